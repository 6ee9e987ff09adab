"""One connection to a SQLite file: queries prepared, arguments encoded, answers decoded."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, cast, overload
from uuid import UUID

import msgspec

from tenuto.clock import from_micros, to_micros
from tenuto.model.errors import Invalid
from tenuto.store import sql
from tenuto.store.protocol import Row, Rows, Statement


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


@lru_cache(maxsize=4096)
def _spelled(value: UUID) -> str:
    """An id as text: the steps of a query say each several times."""
    return str(value)


_ENCODE: dict[str, Callable[[Any], Any]] = {
    "uuid": _spelled,
    "timestamptz": to_micros,
    "boolean": int,
    "bigint[]": _json,
    "uuid[]": _json,
    "text[]": _json,
}
_UUIDS = frozenset(
    "id task workspace agent parent target_agent definition flow group_id rerun_of child needs"
    " follows subject wanted_id before_id user_id webhook last_flow cause origin made_by"
    " registered_by".split()
)
_TIMES = frozenset({"at", "until", "lease_until", "wait_until", "closed_until"})
_FLAGS = frozenset({"watched", "unconfirmed", "met", "enabled"})


@lru_cache(maxsize=256)
def _time(value: Any) -> Any:
    try:
        return from_micros(value)
    except (OverflowError, TypeError):
        return value  # beyond the calendar: found out like a damaged id


@lru_cache(maxsize=1024)
def _uuid(value: Any) -> Any:
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        return value  # a damaged id: whoever reads the row finds out and quarantines it


def _decoder(column: str) -> Callable[[Any], Any] | None:
    if column in _UUIDS:
        return _uuid
    if column in _TIMES or column.endswith("_at"):
        return _time
    return bool if column in _FLAGS else None


_Encoders = list[tuple[int, Callable[[Any], Any] | None]]
"""Columns by their place, and what encodes them."""


class _PreparedQuery:
    """A query's steps with what is needed to bind their arguments and read their answers."""

    def __init__(self, query: sql.Query, single: frozenset[str]) -> None:
        self.query = query
        self.steps = sql.for_sqlite(query, single)
        kinds = query.params.items()
        self._params = [(name, _ENCODE[kind]) for name, kind in kinds if kind in _ENCODE]
        self._columns = {
            step.label: self._encoders(step) for step in self.steps if step.rowset is not None
        }
        self._decoders: list[tuple[int, Callable[[Any], Any]]] | None = None
        self._names: list[str] = []

    def params(self, given: dict[str, Any]) -> dict[str, Any]:
        """The parameters, encoded."""
        values = dict(given)
        for name, encode in self._params:
            if (value := values.get(name)) is not None:
                values[name] = encode(value)
        return values

    def _encoders(self, step: sql.SqliteStep) -> _Encoders:
        """The columns that a step reads of its set; JSON spells ids by itself."""
        columns = self.query.rows[step.rowset or ""]
        encoders = {index: _ENCODE.get(columns[index][1]) for index in step.uses}
        return [
            (index, None if step.whole and encode is _spelled else encode)
            for index, encode in encoders.items()
        ]

    def cells(self, step: sql.SqliteStep, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The columns that a step reads of the rows of its set, encoded."""
        columns = self._columns[step.label]
        if len(rows) == 1:
            [row] = rows
            return [[_encoded(row[index], encode) for index, encode in columns]]
        uses = step.uses
        encoders = [(index, encode) for index, encode in columns if encode is not None]
        if not encoders:
            every = rows and len(uses) == len(rows[0])
            return list(rows) if every else [[row[index] for index in uses] for row in rows]
        encoded = []
        last: dict[int, tuple[Any, Any]] = {}  # rows of a set often share a value: encoded once
        for row in rows:
            full = list(row)
            for index, encode in encoders:
                value = full[index]
                if value is None:
                    continue
                known = last.get(index)
                if known is None or known[0] is not value:
                    known = last[index] = (value, encode(value))
                full[index] = known[1]
            encoded.append([full[index] for index in uses])
        return encoded

    def answer(self, rows: "StepRows") -> Rows:
        """The rows of the answer's step by their names; of many, only when they are looked at."""
        if rows.many:
            rows.read = self._named
            return rows
        return self._named(rows.cells, rows.description)

    def _named(self, rows: list[Any], description: Any) -> list[Row]:
        if not rows:
            return []
        if self._decoders is None:
            self._names = [column[0] for column in description]
            found = ((i, _decoder(name)) for i, name in enumerate(self._names))
            wanted = self.query.columns or self._names
            self._decoders = [
                (i, decode)
                for i, decode in found
                if decode is not None and self._names[i] in wanted
            ]
        names, decoders = self._names, self._decoders
        answers: list[Row] = []
        for row in rows:
            cells = list(row)
            for index, decode in decoders:
                if (cell := cells[index]) is not None:
                    cells[index] = decode(cell)
            answers.append(dict(zip(names, cells, strict=True)))
        return answers


def _encoded(value: Any, encode: Callable[[Any], Any] | None) -> Any:
    return value if encode is None or value is None else encode(value)


class StepRows(Rows):
    """What a step answered, by position in `cells`; by name for whoever gets it as an answer.

    Many rows are one JSON text until somebody looks: the loop has more time for that than the
    thread that writes.
    """

    read: Callable[[list[Any], Any], list[Row]]

    def __init__(self, found: list[Any] | str, description: Any, *, many: bool = False) -> None:
        self._found = found
        self.description = description
        self.many = many
        self._named: list[Row] | None = None

    @property
    def cells(self) -> list[Any]:
        if isinstance(self._found, str):
            self._found = cast("list[Any]", msgspec.json.decode(self._found))
        return self._found

    def _rows(self) -> list[Row]:
        if self._named is None:
            self._named = self.read(self.cells, self.description)
        return self._named

    def __len__(self) -> int:
        return len(self.cells)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._rows()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows())


_NOTHING = StepRows([], None)


class WriterBusy(Exception):
    """Somebody else is writing."""


_STATEMENTS = 1000
"""Prepared statements that a connection keeps: more than there are."""
MANY = 64
"""So many rows are worth one text."""


class Connection:
    """One SQLite connection and the queries prepared for it. Used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self.raw = sqlite3.connect(
            path,
            isolation_level=None,
            check_same_thread=False,
            timeout=10,
            cached_statements=_STATEMENTS,
        )
        self._waits = True
        self._check_ours(path)
        if self.raw.execute("pragma journal_mode").fetchone()[0] != "wal":
            self.raw.execute("pragma journal_mode = wal")
        self.raw.execute("pragma synchronous = full")
        self.raw.execute("pragma wal_autocheckpoint = 4000")
        self.raw.execute("pragma cache_size = -16000")
        self._prepared: dict[Any, _PreparedQuery] = {}
        self._together: dict[str, tuple[str, Any]] = {}

    def _check_ours(self, path: str) -> None:
        """Raise `Invalid` for a database of another program, before anything in it is changed."""
        rows = self.raw.execute("select name from sqlite_master where type = 'table'")
        names = {row[0] for row in rows}
        if names and "schema_migration" not in names:
            self.raw.close()
            raise Invalid(f"{path} is a database of another program", "database_invalid")

    def begin(self, *, wait: bool) -> None:
        """Begin to write; unless the caller may wait, `Busy` when somebody else does."""
        if wait is not self._waits:
            self.raw.execute(f"pragma busy_timeout = {10_000 if wait else 0}")
            self._waits = wait
        try:
            self.raw.execute("begin immediate")
        except sqlite3.OperationalError as error:
            if wait or "locked" not in str(error):
                raise
            raise WriterBusy from error

    def prepare(self, statement: Statement) -> _PreparedQuery:
        sizes = tuple([(name, min(len(rows), 2)) for name, rows in statement.rows.items()])
        given = [name for name, value in statement.params.items() if value is not None]
        literals = tuple(statement.literals.items())
        key = (statement.query, *given, literals, sizes)
        prepared = self._prepared.get(key)
        if prepared is None:
            query = sql.load(sql.SQLITE)[statement.query]
            full = {name for name, size in sizes if size > 0}
            single = frozenset(name for name, size in sizes if size == 1)
            known = frozenset(given) | frozenset(statement.literals)
            prepared = _PreparedQuery(sql.variant(query, known, literals, full), single)
            sql.keep(self._prepared, key, prepared)
        return prepared

    @contextmanager
    def lenient(self) -> Iterator[None]:
        """Read text that is not UTF-8, for a row that somebody damaged."""
        self.raw.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            yield
        finally:
            self.raw.text_factory = str

    def read(self, statement: Statement) -> list[Row]:
        """Run a statement outside a transaction."""
        try:
            return list(self.run(statement))
        except sqlite3.OperationalError as error:
            if "UTF-8" not in str(error):
                raise
        with self.lenient():
            return list(self.run(statement))

    def run(self, statement: Statement) -> Rows:
        """Run the statement's steps in order; answers the rows of its answer step."""
        prepared = self.prepare(statement)
        values = prepared.params(statement.params)
        returned: dict[str, StepRows] = {}
        for step in prepared.steps:
            base = tuple([values.get(name) for name in step.params]) if step.params else ()
            returned[step.label] = self._step(step, base, prepared, statement, returned)
        return prepared.answer(returned.get(prepared.query.answer, _NOTHING))

    def _step(
        self,
        step: sql.SqliteStep,
        base: tuple[Any, ...],
        prepared: _PreparedQuery,
        statement: Statement,
        returned: dict[str, StepRows],
    ) -> StepRows:
        if step.rowset is None and step.source is None:
            return self._execute(step, step.sql, base, statement.params.get("n") or 0)
        if step.flat:
            places = [row[step.uses[0]] for row in returned[step.source or ""].cells]
            if len(places) == 1 and step.one != step.sql:
                return self._execute(step, step.one, (*base, places[0]), 1)
            return self._execute(step, step.sql, (*base, _json(places)), len(places))
        if step.source is not None:
            uses = step.uses
            inputs = [[row[index] for index in uses] for row in returned[step.source].cells]
        else:
            rows = statement.rows[step.rowset or ""]
            if step.of is not None:
                kept = {row[0] for row in returned[step.of].cells}
                rows = [row for row in rows if _spelled(row[0]) in kept]
            inputs = prepared.cells(step, rows)
        return self._with_set(step, base, inputs)

    def _with_set(self, step: sql.SqliteStep, base: tuple[Any, ...], inputs: list[Any]) -> StepRows:
        if not inputs:
            return _NOTHING
        if step.whole:
            return self._execute(step, step.sql, (*base, _json(inputs)), len(inputs))
        found: list[tuple[Any, ...]] = []
        description = None
        execute = self.raw.execute
        for cells in inputs:
            cursor = execute(step.sql, (*base, *cells))
            if cursor.description is not None:
                found += cursor.fetchall()
                description = cursor.description
        return _NOTHING if description is None else StepRows(found, description)

    def _execute(
        self, step: sql.SqliteStep, text: str, arguments: tuple[Any, ...], size: int
    ) -> StepRows:
        """The answer to a step that is about so many rows."""
        many = step.in_one and size >= MANY
        if many and (known := self._together.get(text)):
            together, description = known
            with suppress(sqlite3.DataError):  # longer than a text may be: row by row, then
                [[found]] = self.raw.execute(together, arguments).fetchall()
                return StepRows(found, description, many=True)
        cursor = self.raw.execute(text, arguments)
        description = cursor.description
        if description is None:
            return _NOTHING
        found = cursor.fetchall()
        if many:  # now its columns are known
            together = sql.in_one(text, [column[0] for column in description])
            self._together[text] = together, description
        return StepRows(found, description, many=many)
