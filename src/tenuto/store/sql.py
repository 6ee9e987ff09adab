"""Reads the files of `queries/` and renders each query for one database.

A query is a list of steps that share a transaction. Its header declares its inputs and its answer:

    -- name: complete
    -- One sentence of contract.
    -- params: now timestamptz
    -- rows: done(id uuid, attempt bigint)
    -- rows: note(id uuid = done.id, text text)    (a column with the same values, row by row, as a
                             column of another set: PostgreSQL receives it once)
    -- as: moved            (label of the step that follows; a select step names its columns too,
                             as in `picked(id)`)
    -- as: work, in one     (SQLite returns many rows of the step as one text, see `SqliteStep`)
    -- answer: moved(id)    (the step whose rows are the answer, and the columns; by default all
                             columns of the last step)

Its text can contain
    :name                   a parameter
    {rows:done}             the set `done` as a table
    {rows:done of moved}    only rows whose first column equals the first column of a row of `moved`
    {moved}                 the rows that the step `moved` returned, as a table
    {places:moved}          SQLite only: their column `place` as a JSON array
    {columns:task}          the columns of Task, in order
    {names:hot.timed} {values:…} {typed:…} {request:…} {cleared:…} {equal_filters}
                            the columns of new tasks and their filters, see `task_columns.py`
    {fragment:name}         text under `-- fragment: name`, which may exist once per database; if
                            that leaves a step empty, the step belongs to the other database
    {seconds:expr} {greatest} {lock} {skip_locked} {xid} {place} {ascii} {each:lanes}
                            replaced by the dialect's text
    [name: text]            text that is included only if the parameter or literal `name` is given
    {own:task}              a condition that the row belongs to the tenant's workspace: SQLite's
                            tenants pass `:workspace` with every statement, PostgreSQL's row
                            policies check it by themselves
    {event of moved: kind = 'ready', previous = 'WAITING'}
                            `insert into event (...) select ...` up to its `from`: the audit row of
                            each row of `moved`. Columns that are not named are `task` = moved.id,
                            `seq` = moved.version, `workspace` = moved.workspace, `xid` = {xid},
                            `level` = 'INFO', `attempt` = 0, `actor` = :actor, `at` = :now, and
                            null. `{event: ...}` without a set takes :id and :workspace. No other
                            text inserts into `event`.
    {terminal} {leased} {group_open}
                            the statuses of the model's sets of that name, as in `in {terminal}`
    {literal:name}          constants of the program (never a caller's text), for conditions that an
                            index must recognise

PostgreSQL runs all steps as one statement of common table expressions over arrays: one round trip,
one snapshot. SQLite runs them one after the other. There, a step that reads few columns of a set
gets the set as JSON; one that reads many runs once per row; each is the faster way. So a step must
not depend on what another step wrote, except through `{label}`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

from tenuto.model.flows.groups import GROUP_OPEN, GroupStatus
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, Task
from tenuto.store import task_columns
from tenuto.store.dialects import Dialect

T = TypeVar("T")
Column = tuple[str, str]
Literals = tuple[tuple[str, tuple[str, ...]], ...]

MAX_CACHED = 2000
"""Rendered queries that are cached: callers choose filters, so their number has no other limit."""
_ROWS = re.compile(r"\{rows:(\w+)(?: of (\w+))?\}")
_PLACES = re.compile(r"\{places:(\w+)\}")
_PARAM = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)(?!\w)")
_MACRO = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_EVENT = re.compile(r"\{event(?: of (\w+))?: ((?:[^{}']|'[^']*')*)\}")
_EVENT_COLUMNS = (
    *("task", "seq", "workspace", "xid", "kind", "level", "message", "previous", "new"),
    *("attempt", "agent", "actor", "session_key", "stack_trace", "data", "causation_id", "at"),
)
_OWN = "[workspace: "
_OPTIONAL = re.compile(r"\[(\w+): (.*?)\]", flags=re.S)


class Step(msgspec.Struct, frozen=True):
    """One SQL statement of a query."""

    label: str
    text: str
    returns: tuple[str, ...] = ()
    in_one: bool = False


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A named query, parsed; sets and labels are still placeholders."""

    name: str
    params: dict[str, str]
    rows: dict[str, tuple[Column, ...]]
    steps: tuple[Step, ...]
    answer: str
    columns: tuple[str, ...] = ()
    twins: dict[tuple[str, int], tuple[str, int]] = {}
    """Columns `(set, index)` that equal a column of another set with the same number of rows."""


_STATUS_LISTS = {
    name: "(" + ", ".join(f"'{status}'" for status in statuses if status in chosen) + ")"
    for name, statuses, chosen in (
        ("terminal", Status, TERMINAL),
        ("leased", Status, LEASED),
        ("group_open", GroupStatus, GROUP_OPEN),
    )
}


def source_text() -> str:
    """Returns the text of all files of `queries/`, joined in order of their names."""
    folder = resources.files("tenuto.store").joinpath("queries")
    files = sorted(folder.iterdir(), key=lambda path: path.name)
    return "\n".join(path.read_text() for path in files if path.name.endswith(".sql"))


@cache
def load(dialect: Dialect) -> dict[str, Query]:
    """Returns all queries by name, in the dialect; sets and labels stay placeholders."""
    source = source_text()
    fragments: dict[str, str] = {}
    queries: dict[str, Query] = {}
    named: list[str] = []
    for chunk in re.split(r"^(?=-- (?:name|fragment): )", source, flags=re.M)[1:]:
        match = re.match(r"-- fragment: (\w+)(?: only (\w+))?", chunk)
        if match is None:
            named.append(chunk)
        elif match[2] in (None, dialect.name):
            fragments[match[1]] = _without_comments(chunk)
    for chunk in named:
        query = _parse_query(chunk, lambda text: _render(text, dialect, fragments))
        assert query.name not in queries, f"two queries named {query.name}"
        queries[query.name] = query
    return queries


def _without_comments(chunk: str) -> str:
    """Returns the SQL of a chunk without comments and the last semicolon."""
    lines = (line for line in chunk.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).strip().rstrip(";")


def _render(text: str, dialect: Dialect, fragments: dict[str, str]) -> str:
    """Returns the text with all macros of the dialect replaced, also in fragments."""
    plain = _STATUS_LISTS | {
        "greatest": dialect.greatest,
        "lock": dialect.lock,
        "skip_locked": dialect.skip_locked,
        "xid": dialect.xid,
        "place": dialect.place,
        "ascii": dialect.ascii,
        "equal_filters": task_columns.filter_conditions(),
        "equal_filter_params": task_columns.filter_params(),
    }

    formats = {"seconds": dialect.seconds, "each": dialect.each, "own": dialect.own}

    def replace(match: re.Match[str]) -> str:
        macro, argument = match[1], match[2] or ""
        if macro == "columns":
            return ", ".join(f"{argument}.{field}" for field in Task.__struct_fields__)
        if macro == "fragment":
            return fragments[argument]
        if macro in formats:
            return formats[macro].format(argument)
        if macro in task_columns.MACROS:
            return task_columns.expand(macro, argument)
        return plain.get(macro, match[0])

    rendered = _MACRO.sub(replace, text)
    if rendered != text:
        return _render(rendered, dialect, fragments)
    return _EVENT.sub(lambda match: _event_insert(match[1], match[2], dialect), rendered)


def _event_insert(source: str | None, columns_text: str, dialect: Dialect) -> str:
    """Returns the `insert into event ... select ...` of a macro `{event of source: columns}`."""
    values = {
        "task": f"{source}.id" if source else ":id",
        "seq": f"{source}.version",
        "workspace": f"{source}.workspace" if source else ":workspace",
        "xid": dialect.xid,
        "level": "'INFO'",
        "attempt": "0",
        "actor": ":actor",
        "at": ":now",
    }
    for part in re.split(r",\s+(?=\w+ = )", columns_text):
        column, _, value = part.partition(" = ")
        values[column] = value
    assert values.keys() <= set(_EVENT_COLUMNS), f"unknown column of event: {columns_text}"
    columns = [column for column in _EVENT_COLUMNS if values.get(column, "null") != "null"]
    cells = ", ".join(values[column] for column in columns)
    return f"insert into event ({', '.join(columns)})\nselect {cells}"


def _parse_query(chunk: str, render: Callable[[str], str]) -> Query:
    """Parses one `-- name:` chunk; `render` replaces the macros of a dialect."""
    lines = re.findall(r"^-- (name|params|rows|answer): (.*)$", chunk, flags=re.M)
    headers = [(key, render(value)) for key, value in lines]
    name = next(value for key, value in headers if key == "name")
    params = dict(
        _parse_column(part)
        for key, value in headers
        if key == "params"
        for part in value.split(",")
    )
    rowsets = dict(_parse_rowset(value) for key, value in headers if key == "rows")
    rows = {rowset: tuple(column[:2] for column in columns) for rowset, columns in rowsets.items()}
    steps = tuple(_parse_steps(chunk, render))
    if any(_OWN in step.text for step in steps):
        params.setdefault("workspace", "uuid")
    answer = next((value for key, value in headers if key == "answer"), steps[-1].label)
    label, _, columns = answer.rstrip(") ").partition("(")
    answer_columns = tuple(column.strip() for column in columns.split(",") if column)
    return Query(
        name=name,
        params=params,
        rows=rows,
        steps=steps,
        answer=label,
        columns=answer_columns,
        twins=_shared_columns(rowsets),
    )


def _parse_column(text: str) -> Column:
    """Parses `name type`; returns both."""
    column, _, kind = text.strip().partition(" ")
    return column, kind


def _parse_rowset(text: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Parses a `rows` header; returns the set's name and its (column, type, equal column)s."""
    name, _, columns = text.partition("(")
    parsed = []
    for part in columns.rstrip(") ").split(","):
        definition, _, twin = part.partition(" = ")
        parsed.append((*_parse_column(definition), twin))
    return name.strip(), parsed


def _shared_columns(
    rowsets: dict[str, list[tuple[str, str, str]]],
) -> dict[tuple[str, int], tuple[str, int]]:
    """Maps each column `(set, index)` declared as equal to a column of another set to that one."""
    positions = {
        f"{name}.{column}": (name, index)
        for name, columns in rowsets.items()
        for index, (column, _, _) in enumerate(columns)
    }
    return {
        (name, index): positions[twin]
        for name, columns in rowsets.items()
        for index, (_, _, twin) in enumerate(columns)
        if twin
    }


def _parse_steps(chunk: str, render: Callable[[str], str]) -> Iterable[Step]:
    """Yields the steps of a chunk that belong to the dialect."""
    for number, part in enumerate(re.split(r";[ \t]*$", chunk, flags=re.M)):
        text = _without_comments(part)
        if not text:
            continue
        label = re.search(r"^-- as: (\w+)(?:\(([\w, ]+)\))?(, in one)?", part, flags=re.M)
        rendered = render(text)
        if not rendered:
            continue  # the step belongs to the other database
        columns = _returning_columns(rendered)
        if label and label[2]:
            columns = tuple(column.strip() for column in label[2].split(","))
        name, in_one = (label[1], bool(label[3])) if label else (f"step_{number}", False)
        yield Step(name, rendered, columns, in_one)


def _returning_columns(text: str) -> tuple[str, ...]:
    """Returns the column names of the last `returning` clause; empty if there is none."""
    _, keyword, clause = text.rpartition("returning")
    if not keyword:
        return ()
    names = re.split(r",(?![^(]*\))", clause)
    return tuple(re.split(r"[\s.]+", name.strip())[-1] for name in names)


def cache_put(entries: dict[Any, T], key: Any, value: T) -> None:
    """Stores a value in a cache; removes the oldest entry if the cache is full."""
    if len(entries) >= MAX_CACHED:
        del entries[next(iter(entries))]
    entries[key] = value


def variant(
    query: Query, present: frozenset[str], literals: Literals, non_empty: set[str]
) -> Query:
    """Returns the query with optional parts resolved, without steps whose sets are empty.

    `present` names the parameters and literals that are given; `non_empty` the sets with rows.
    """
    values = {name: ", ".join(f"'{literal}'" for literal in texts) for name, texts in literals}
    assert all(literal.replace("_", "").isalpha() for _, texts in literals for literal in texts)

    def resolve(text: str) -> str:
        text = _OPTIONAL.sub(lambda match: match[2] if match[1] in present else "", text)
        for name, texts in values.items():
            text = text.replace(f"{{literal:{name}}}", texts)
        return text

    steps = tuple(
        msgspec.structs.replace(step, text=resolve(step.text))
        for step in query.steps
        if all(match[1] in non_empty for match in _ROWS.finditer(step.text))
    )
    return msgspec.structs.replace(query, steps=steps)


class PostgresQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One statement and its arguments in order; `(set, index)` is a column of a set."""

    sql: str
    arguments: tuple[str | tuple[str, int], ...]


ConstantColumns = frozenset[tuple[str, int]]
"""Columns `(set, index)` with one value in all rows of their set; all columns of a single row."""


def for_postgres(query: Query, constant: ConstantColumns = frozenset()) -> PostgresQuery:
    """Returns all steps as one statement of CTEs; `constant` columns are values, not arrays."""
    labels = {step.label for step in query.steps}

    def expand(text: str) -> str:
        text = _ROWS.sub(lambda match: _rowset_table(query, match[1], match[2], constant), text)
        return _MACRO.sub(lambda match: match[1] if match[1] in labels else match[0], text)

    *before, last = [Step(step.label, expand(step.text)) for step in query.steps]
    if query.answer != last.label:
        before.append(last)
        last = Step("answer", f"select {', '.join(query.columns) or '*'} from {query.answer}")
    ctes = ",\n".join(f"{step.label} as {_materialized(step)}({step.text})" for step in before)
    return _number_arguments(query, f"with {ctes}\n{last.text}" if ctes else last.text, constant)


def _materialized(step: Step) -> str:
    """Returns `materialized ` for a select, which may lock and limit, so runs once; else `""`."""
    return "materialized " if step.text.startswith("select") else ""


def _rowset_table(query: Query, name: str, of: str | None, constant: ConstantColumns) -> str:
    """Returns a set as a PostgreSQL table; with `of`, only rows whose id that step returned."""
    text = "\n".join(step.text for step in query.steps)
    names = [column for column, _ in query.rows[name]]
    constant_names: list[str] = []
    varying_names: list[str] = []
    for index, column_name in enumerate(names):
        if index == 0 or re.search(rf"\b{name}\.{column_name}\b", text):
            (constant_names if (name, index) in constant else varying_names).append(column_name)
    arrays = ", ".join(f":{name}__{column_name}" for column_name in varying_names)
    table = f"unnest({arrays}) as {name}({', '.join(varying_names)})"
    if constant_names:
        cells = [f":{name}__{column_name} as {column_name}" for column_name in constant_names]
        cells += [f"{name}.{column_name}" for column_name in varying_names]
        source = f" from {table}" if varying_names else ""
        table = f"(select {', '.join(cells)}{source}) as {name}"
    if of is None:
        return table
    return f"(select {name}.* from {table} join {of} on {of}.id = {name}.{names[0]}) as {name}"


def _number_arguments(query: Query, text: str, constant: ConstantColumns) -> PostgresQuery:
    """Returns the query with each `:name` as a numbered, typed placeholder, and its arguments."""
    arguments: list[str | tuple[str, int]] = []

    def placeholder(match: re.Match[str]) -> str:
        name = match[1]
        rowset, _, column = name.partition("__")
        argument: str | tuple[str, int] = name
        if column:
            columns = query.rows[rowset]
            index = next(i for i, (column_name, _) in enumerate(columns) if column_name == column)
            argument = (rowset, index)
            kind = columns[index][1] + ("" if argument in constant else "[]")
            twin = query.twins.get(argument, argument)
            if (twin in constant) is (argument in constant):
                argument = twin
        else:
            kind = query.params[name]
        if argument not in arguments:
            arguments.append(argument)
        return f"${arguments.index(argument) + 1}::{kind}"

    return PostgresQuery(sql=_PARAM.sub(placeholder, text), arguments=tuple(arguments))


_JSON_VALUES = "(select value from json_each(?{}))"

MAX_JSON_COLUMNS = 9
"""A step that reads more columns of a set runs row by row: JSON is searched once per column."""


class SqliteStep(msgspec.Struct, frozen=True, kw_only=True):
    """One prepared statement: parameters first, then its set, as one value or row by row."""

    label: str
    sql: str
    params: tuple[str, ...]
    uses: tuple[int, ...] = ()
    rowset: str | None = None
    of: str | None = None
    source: str | None = None
    flat: bool = False
    """True if the set is one column, `uses`, passed as a plain array."""
    one: str = ""
    """The SQL for an array of one item, passed as a plain value, which avoids a temporary table."""
    whole: bool = True
    """True if the set is one JSON parameter; else the statement runs once per row."""
    in_one: bool = False
    """True if many rows are returned as one JSON text: fetching single rows takes the interpreter
    from the event loop at every row. Columns are text and integers; JSON rounds others."""


def for_sqlite(
    query: Query, single: frozenset[str] | set[str] = frozenset()
) -> tuple[SqliteStep, ...]:
    """Returns the steps as separate statements; `single` names the sets that have one row."""
    return tuple(_sqlite_step(query, step, single) for step in query.steps)


def _sqlite_step(query: Query, step: Step, single: frozenset[str] | set[str]) -> SqliteStep:
    """Returns one step rendered for SQLite; `single` names the sets that have one row."""
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

    def placeholder(match: re.Match[str]) -> str:
        if match[1] not in order:
            order.append(match[1])
        return f"?{order.index(match[1]) + 1}"

    text = _PARAM.sub(placeholder, text)
    uses: tuple[int, ...] = ()
    whole = True
    flat = _PLACES.search(text)
    if flat is not None:
        source = flat[1]
        returned = next(candidate.returns for candidate in query.steps if candidate.label == source)
        text, uses = _PLACES.sub(f"?{len(order) + 1}", text), (returned.index("place"),)
    elif (name := rowset or source) is not None:
        uses = _used_columns(text, name, columns)
        # A select returns columns of the set by their names, which parameters do not have.
        selects_set = text.startswith("select") and f"{name}." in text.partition("from")[0]
        binds_row = name in single and not selects_set and _from_pattern(name).search(text)
        whole = len(uses) <= MAX_JSON_COLUMNS and not binds_row
        bind = _bind_set if whole else _bind_row
        text = bind(text, name, [columns[use] for use in uses], len(order) + 1)
    return SqliteStep(
        label=step.label,
        sql=text,
        params=tuple(order),
        uses=uses,
        rowset=rowset,
        of=of,
        source=source,
        flat=flat is not None,
        one=text.replace(_JSON_VALUES.format(len(order) + 1), f"(?{len(order) + 1})"),
        whole=whole,
        in_one=step.in_one,
    )


def json_array_select(text: str, columns: Sequence[str]) -> str:
    """Returns a SQLite select that returns the rows of `text` as one JSON array of arrays."""
    cells = ", ".join(f'"{column}"' for column in columns)
    return f"select json_group_array(json_array({cells})) from ({text})"


def _used_columns(text: str, name: str, columns: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the indexes of the columns of a set that a step reads."""
    indexed = enumerate(columns)
    return tuple(i for i, column in indexed if re.search(rf"\b{name}\.{column}\b", text))


def _table_pattern(name: str) -> str:
    """Returns the text of a pattern that matches a set's placeholder."""
    return rf"\{{(?:rows:)?{name}(?: of \w+)?\}}"


def _from_pattern(name: str) -> re.Pattern[str]:
    """Returns the pattern of a `from` clause with a set's placeholder."""
    return re.compile(rf"from\s+{_table_pattern(name)}")


def _bind_set(text: str, name: str, columns: list[str], start: int) -> str:
    """Returns the SQLite text that reads the set from one JSON parameter, number `start`."""
    cells = ", ".join(f"value ->> {i} as {column}" for i, column in enumerate(columns))
    return re.sub(
        _table_pattern(name), f"(select {cells} from json_each(?{start})) as {name}", text
    )


def _bind_row(text: str, name: str, columns: list[str], start: int) -> str:
    """Returns the SQLite text for one row of a set: parameters from number `start`, by column."""
    replacement = "" if text.startswith("update") else "from (select 1)"
    text = _from_pattern(name).sub(replacement, text)
    for i, column in enumerate(columns):
        text = re.sub(rf"\b{name}\.{column}\b", f"?{start + i}", text)
    return text
