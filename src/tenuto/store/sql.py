"""Reads the files of `queries/` and spells its queries for one database.

A query is a list of steps that share a transaction. Its header declares what it takes:

    -- name: complete
    -- One sentence of contract.
    -- params: now timestamptz
    -- rows: done(id uuid, attempt bigint)
    -- rows: told(id uuid = done.id, text text)    (a column that another set has, row by row:
                             PostgreSQL is sent it once)
    -- as: moved            (label of the step that follows; a select step names its columns too,
                             as in `picked(id)`)
    -- as: work, in one     (SQLite answers many rows of the step as one text, see `SqliteStep`)
    -- answer: moved(id)    (the step whose rows are the answer, and which of its columns; else the
                             last step's, all)

and its text may say
    :name                   a parameter
    {rows:done}             the set `done` as a table
    {rows:done of moved}    only those rows whose first column is the first of a row of `moved`
    {moved}                 the rows that the step `moved` returned, as a table
    {places:moved}          SQLite only: their column `place` as a JSON array
    {columns:task}          the columns of Task, in order
    {fragment:name}         text under `-- fragment: name`, which may exist once per database; where
                            that leaves a step empty, it is one of the other database
    {seconds:expr} {greatest} {lock} {skip_locked} {xid} {place} {ascii} {each:lanes}
                            spelled by the dialect
    [name: text]            text only where the parameter or literal `name` is given
    {own:task}              `and` that the row is of the caller's workspace, where a tenant asks:
                            SQLite's tenants give `:workspace` with every statement, PostgreSQL's
                            row policies say it by themselves
    {literal:name}          words of our own (never a caller's), where an index needs to see them

PostgreSQL runs all steps as one statement of common table expressions over arrays: one round trip,
one snapshot. SQLite runs them one after the other; a step that reads few columns of a set gets the
set as JSON, one that reads many runs once per row, each being the faster way. So no step may depend
on what another one wrote, except through `{label}`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

from tenuto.model.tasks.task import Task

T = TypeVar("T")
Column = tuple[str, str]
Literals = tuple[tuple[str, tuple[str, ...]], ...]

MOST_KEPT = 2000
"""Spellings that are kept at a time: callers choose their filters, of which there is no end."""
_ROWS = re.compile(r"\{rows:(\w+)(?: of (\w+))?\}")
_PLACES = re.compile(r"\{places:(\w+)\}")
_PARAM = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)(?!\w)")
_MACRO = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_OWN = "[workspace: "
_OPTIONAL = re.compile(r"\[(\w+): (.*?)\]", flags=re.S)


class Step(msgspec.Struct, frozen=True):
    """One SQL statement of a query."""

    label: str
    text: str
    returns: tuple[str, ...] = ()
    in_one: bool = False


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A named query as written."""

    name: str
    params: dict[str, str]
    rows: dict[str, tuple[Column, ...]]
    steps: tuple[Step, ...]
    answer: str
    columns: tuple[str, ...] = ()
    twins: dict[tuple[str, int], tuple[str, int]] = {}
    """Columns `(set, index)` that are also those of another set, whose rows are as many."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How one database spells what the two say differently."""

    name: str
    seconds: str
    greatest: str
    lock: str
    skip_locked: str
    each: str
    xid: str
    """The number of the transaction, where transactions overlap."""
    place: str
    """Where a row is, good for the rest of the statement that found it."""
    ascii: str
    """After a text whose other letters `lower` is to leave alone, whatever the locale."""
    own: str
    """A condition that holds for rows of the tenant who asks; it must not choose an index."""


POSTGRES = Dialect(
    name="postgres",
    seconds="(({0}) * interval '1 second')",
    greatest="greatest",
    lock="for update",
    skip_locked="for update skip locked",
    each="unnest(:{0}) as {0}(value)",
    xid="(select pg_current_xact_id()::text::bigint)",
    place="ctid",
    ascii=' collate "C"',
    own="",
)
SQLITE = Dialect(
    name="sqlite",
    seconds="(({0}) * 1000000)",
    greatest="max",
    lock="",
    skip_locked="",
    each="json_each(:{0}) as {0}",
    xid="0",
    place="rowid",
    ascii="",
    own="[workspace: and +{0}.workspace = :workspace]",
)


def source_text() -> str:
    """All files of `queries/`, one after the other."""
    folder = resources.files("tenuto.store").joinpath("queries")
    files = sorted(folder.iterdir(), key=lambda path: path.name)
    return "\n".join(path.read_text() for path in files if path.name.endswith(".sql"))


@cache
def load(dialect: Dialect) -> dict[str, Query]:
    """Every query of `queries/` in the dialect's spelling, sets and labels still open."""
    source = source_text()
    fragments: dict[str, str] = {}
    queries: dict[str, Query] = {}
    named: list[str] = []
    for chunk in re.split(r"^(?=-- (?:name|fragment): )", source, flags=re.M)[1:]:
        match = re.match(r"-- fragment: (\w+)(?: only (\w+))?", chunk)
        if match is None:
            named.append(chunk)
        elif match[2] in (None, dialect.name):
            fragments[match[1]] = _strip(chunk)
    for chunk in named:
        query = _parse(chunk, lambda text: _render(text, dialect, fragments))
        assert query.name not in queries, f"two queries named {query.name}"
        queries[query.name] = query
    return queries


def _strip(chunk: str) -> str:
    lines = (line for line in chunk.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).strip().rstrip(";")


def _render(text: str, dialect: Dialect, fragments: dict[str, str]) -> str:
    plain = {
        "greatest": dialect.greatest,
        "lock": dialect.lock,
        "skip_locked": dialect.skip_locked,
        "xid": dialect.xid,
        "place": dialect.place,
        "ascii": dialect.ascii,
    }

    def replace(match: re.Match[str]) -> str:
        macro, argument = match[1], match[2]
        if macro == "columns":
            return ", ".join(f"{argument}.{field}" for field in Task.__struct_fields__)
        if macro == "fragment":
            return fragments[argument]
        if macro == "seconds":
            return dialect.seconds.format(argument)
        if macro == "each":
            return dialect.each.format(argument)
        if macro == "own":
            return dialect.own.format(argument)
        return plain.get(macro, match[0])

    spelled = _MACRO.sub(replace, text)
    return spelled if spelled == text else _render(spelled, dialect, fragments)


def _parse(chunk: str, spell: Callable[[str], str]) -> Query:
    headers = re.findall(r"^-- (name|params|rows|answer): (.*)$", chunk, flags=re.M)
    name = next(value for key, value in headers if key == "name")
    params = dict(
        _column(part) for key, value in headers if key == "params" for part in value.split(",")
    )
    said = dict(_rowset(value) for key, value in headers if key == "rows")
    rows = {each: tuple(column[:2] for column in columns) for each, columns in said.items()}
    steps = tuple(_steps(chunk, spell))
    if any(_OWN in step.text for step in steps):
        params.setdefault("workspace", "uuid")
    answer = next((value for key, value in headers if key == "answer"), steps[-1].label)
    label, _, columns = answer.rstrip(") ").partition("(")
    wanted = tuple(column.strip() for column in columns.split(",") if column)
    return Query(
        name=name,
        params=params,
        rows=rows,
        steps=steps,
        answer=label,
        columns=wanted,
        twins=_shared_columns(said),
    )


def _column(text: str) -> Column:
    column, _, kind = text.strip().partition(" ")
    return column, kind


def _rowset(text: str) -> tuple[str, list[tuple[str, str, str]]]:
    name, _, columns = text.partition("(")
    found = []
    for part in columns.rstrip(") ").split(","):
        said, _, twin = part.partition(" = ")
        found.append((*_column(said), twin))
    return name.strip(), found


def _shared_columns(
    said: dict[str, list[tuple[str, str, str]]],
) -> dict[tuple[str, int], tuple[str, int]]:
    places = {
        f"{name}.{column}": (name, index)
        for name, columns in said.items()
        for index, (column, _, _) in enumerate(columns)
    }
    return {
        (name, index): places[twin]
        for name, columns in said.items()
        for index, (_, _, twin) in enumerate(columns)
        if twin
    }


def _steps(chunk: str, spell: Callable[[str], str]) -> Iterable[Step]:
    for number, part in enumerate(re.split(r";[ \t]*$", chunk, flags=re.M)):
        text = _strip(part)
        if not text:
            continue
        label = re.search(r"^-- as: (\w+)(?:\(([\w, ]+)\))?(, in one)?", part, flags=re.M)
        spelled = spell(text)
        if not spelled:
            continue  # a step of the other database
        columns = _returned(spelled)
        if label and label[2]:
            columns = tuple(column.strip() for column in label[2].split(","))
        name, in_one = (label[1], bool(label[3])) if label else (f"step_{number}", False)
        yield Step(name, spelled, columns, in_one)


def _returned(text: str) -> tuple[str, ...]:
    """The column names of a RETURNING clause."""
    _, found, clause = text.rpartition("returning")
    if not found:
        return ()
    names = re.split(r",(?![^(]*\))", clause)
    return tuple(re.split(r"[\s.]+", name.strip())[-1] for name in names)


def keep(kept: dict[Any, T], key: Any, spelled: T) -> None:
    """Keep a spelling under its key, where there are too many in the place of the oldest."""
    if len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[key] = spelled


def variant(query: Query, given: frozenset[str], literals: Literals, full: set[str]) -> Query:
    """The query with its optional parts settled and with those steps whose sets have rows."""
    words = {name: ", ".join(f"'{word}'" for word in chosen) for name, chosen in literals}
    assert all(word.replace("_", "").isalpha() for _, chosen in literals for word in chosen)

    def settle(text: str) -> str:
        text = _OPTIONAL.sub(lambda match: match[2] if match[1] in given else "", text)
        for name, chosen in words.items():
            text = text.replace(f"{{literal:{name}}}", chosen)
        return text

    steps = tuple(
        msgspec.structs.replace(step, text=settle(step.text))
        for step in query.steps
        if all(match[1] in full for match in _ROWS.finditer(step.text))
    )
    return msgspec.structs.replace(query, steps=steps)


class PostgresQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One statement; its arguments in order, a set's column as `(set, index)`."""

    sql: str
    arguments: tuple[str | tuple[str, int], ...]


Same = frozenset[tuple[str, int]]
"""Columns `(set, index)` that have one value in all rows of their set, of a single row all."""


def for_postgres(query: Query, same: Same = frozenset()) -> PostgresQuery:
    """All steps as one statement of common table expressions; the same columns come once."""
    labels = {step.label for step in query.steps}

    def open_step(text: str) -> str:
        text = _ROWS.sub(lambda match: _set(query, match[1], match[2], same), text)
        return _MACRO.sub(lambda match: match[1] if match[1] in labels else match[0], text)

    *before, last = [Step(step.label, open_step(step.text)) for step in query.steps]
    if query.answer != last.label:
        before.append(last)
        last = Step("answer", f"select {', '.join(query.columns) or '*'} from {query.answer}")
    ctes = ",\n".join(f"{step.label} as {_once(step)}({step.text})" for step in before)
    return _number(query, f"with {ctes}\n{last.text}" if ctes else last.text, same)


def _once(step: Step) -> str:
    """A select is computed once, whatever the planner thinks: it may lock and limit."""
    return "materialized " if step.text.startswith("select") else ""


def _set(query: Query, name: str, of: str | None, same: Same) -> str:
    """A set as a table, with those of its columns that the query reads."""
    text = "\n".join(step.text for step in query.steps)
    names = [column for column, _ in query.rows[name]]
    once: list[str] = []
    varied: list[str] = []
    for index, each in enumerate(names):
        if index == 0 or re.search(rf"\b{name}\.{each}\b", text):
            (once if (name, index) in same else varied).append(each)
    arrays = ", ".join(f":{name}__{each}" for each in varied)
    table = f"unnest({arrays}) as {name}({', '.join(varied)})"
    if once:
        cells = [f":{name}__{each} as {each}" for each in once]
        cells += [f"{name}.{each}" for each in varied]
        source = f" from {table}" if varied else ""
        table = f"(select {', '.join(cells)}{source}) as {name}"
    if of is None:
        return table
    return f"(select {name}.* from {table} join {of} on {of}.id = {name}.{names[0]}) as {name}"


def _number(query: Query, text: str, same: Same) -> PostgresQuery:
    arguments: list[str | tuple[str, int]] = []

    def place(match: re.Match[str]) -> str:
        name = match[1]
        rowset, _, column = name.partition("__")
        argument: str | tuple[str, int] = name
        if column:
            columns = query.rows[rowset]
            index = next(i for i, (each, _) in enumerate(columns) if each == column)
            argument = (rowset, index)
            kind = columns[index][1] + ("" if argument in same else "[]")
            twin = query.twins.get(argument, argument)
            if (twin in same) is (argument in same):
                argument = twin
        else:
            kind = query.params[name]
        if argument not in arguments:
            arguments.append(argument)
        return f"${arguments.index(argument) + 1}::{kind}"

    return PostgresQuery(sql=_PARAM.sub(place, text), arguments=tuple(arguments))


_LISTED = "(select value from json_each(?{}))"

AS_JSON = 9
"""A set read for more columns than this is cheaper row by row: JSON is searched once a column."""


class SqliteStep(msgspec.Struct, frozen=True, kw_only=True):
    """One prepared statement: parameters first, then the set it reads, whole or row by row."""

    label: str
    sql: str
    params: tuple[str, ...]
    uses: tuple[int, ...] = ()
    rowset: str | None = None
    of: str | None = None
    source: str | None = None
    flat: bool = False
    """The set is one column, `uses`, given as a plain array."""
    one: str = ""
    """The same for an array of one, which is given as it is: a list would be made a table first."""
    whole: bool = True
    """The set is one JSON parameter."""
    in_one: bool = False
    """Many rows are answered as one JSON text: whoever fetches rows takes the interpreter from the
    loop at every row. Its columns are text and whole numbers; JSON rounds others."""


def for_sqlite(
    query: Query, single: frozenset[str] | set[str] = frozenset()
) -> tuple[SqliteStep, ...]:
    """The steps as statements of their own; `single` names the sets that have one row."""
    return tuple(_sqlite_step(query, step, single) for step in query.steps)


def _sqlite_step(query: Query, step: Step, single: frozenset[str] | set[str]) -> SqliteStep:
    text, rowset, of, source = step.text, None, None, None
    columns: tuple[str, ...] = ()
    if match := _ROWS.search(text):
        rowset, of = match[1], match[2]
        columns = tuple(column for column, _ in query.rows[rowset])
    for earlier in query.steps:
        if f"{{{earlier.label}}}" in text:
            assert rowset is None, f"{query.name}: a step reads one set"
            source, columns = earlier.label, earlier.returns
    order: list[str] = []

    def place(match: re.Match[str]) -> str:
        if match[1] not in order:
            order.append(match[1])
        return f"?{order.index(match[1]) + 1}"

    text = _PARAM.sub(place, text)
    uses: tuple[int, ...] = ()
    whole = True
    flat = _PLACES.search(text)
    if flat is not None:
        source = flat[1]
        returned = next(each.returns for each in query.steps if each.label == source)
        text, uses = _PLACES.sub(f"?{len(order) + 1}", text), (returned.index("place"),)
    elif (name := rowset or source) is not None:
        uses = _used(text, name, columns)
        # A select answers columns of the set by their names, which parameters do not have.
        answers = text.startswith("select") and f"{name}." in text.partition("from")[0]
        alone = name in single and not answers and _from(name).search(text)
        whole = len(uses) <= AS_JSON and not alone
        given = _with_set if whole else _with_row
        text = given(text, name, [columns[use] for use in uses], len(order) + 1)
    return SqliteStep(
        label=step.label,
        sql=text,
        params=tuple(order),
        uses=uses,
        rowset=rowset,
        of=of,
        source=source,
        flat=flat is not None,
        one=text.replace(_LISTED.format(len(order) + 1), f"(?{len(order) + 1})"),
        whole=whole,
        in_one=step.in_one,
    )


def in_one(text: str, columns: Sequence[str]) -> str:
    """A select of SQLite whose rows are one JSON array of arrays."""
    cells = ", ".join(f'"{column}"' for column in columns)
    return f"select json_group_array(json_array({cells})) from ({text})"


def _used(text: str, name: str, columns: tuple[str, ...]) -> tuple[int, ...]:
    """The columns of a set that a step reads."""
    found = enumerate(columns)
    return tuple(i for i, column in found if re.search(rf"\b{name}\.{column}\b", text))


def _table(name: str) -> str:
    return rf"\{{(?:rows:)?{name}(?: of \w+)?\}}"


def _from(name: str) -> re.Pattern[str]:
    return re.compile(rf"from\s+{_table(name)}")


def _with_set(text: str, name: str, columns: list[str], start: int) -> str:
    """The step's text over a set that is one parameter."""
    cells = ", ".join(f"value ->> {i} as {column}" for i, column in enumerate(columns))
    return re.sub(_table(name), f"(select {cells} from json_each(?{start})) as {name}", text)


def _with_row(text: str, name: str, columns: list[str], start: int) -> str:
    """The step's text over one row of a set, each column a parameter."""
    gone = "" if text.startswith("update") else "from (select 1)"
    text = _from(name).sub(gone, text)
    for i, column in enumerate(columns):
        text = re.sub(rf"\b{name}\.{column}\b", f"?{start + i}", text)
    return text
