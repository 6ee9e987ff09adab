"""One connection to a SQLite file: prepares queries, encodes arguments, decodes rows."""

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
from tenuto.store.dialects import SQLITE
from tenuto.store.protocol import Row, Rows, Statement


def _json(value: Any) -> str:
    """Returns the value as JSON text."""
    return msgspec.json.encode(value).decode()


@lru_cache(maxsize=4096)
def _uuid_text(value: UUID) -> str:
    """Returns an id as text; cached, because the steps of a query use each id several times."""
    return str(value)


_ENCODE: dict[str, Callable[[Any], Any]] = {
    "uuid": _uuid_text,
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
_BOOLEANS = frozenset({"watched", "unconfirmed", "met", "enabled"})


@lru_cache(maxsize=256)
def _decode_time(value: Any) -> Any:
    """Decodes microseconds since 1970; returns any other value unchanged."""
    try:
        return from_micros(value)
    except (OverflowError, TypeError):
        return value  # outside the calendar: detected later like a damaged id


@lru_cache(maxsize=1024)
def _decode_uuid(value: Any) -> Any:
    """Decodes an id; returns a value that is no id unchanged."""
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        return value  # a damaged id: the reader of the row detects it and quarantines the row


def _decoder(column: str) -> Callable[[Any], Any] | None:
    """Returns the decoder of a UUID, time or boolean column, by its name; `None` for others."""
    if column in _UUIDS:
        return _decode_uuid
    if column in _TIMES or column.endswith("_at"):
        return _decode_time
    return bool if column in _BOOLEANS else None


_Encoders = list[tuple[int, Callable[[Any], Any] | None]]
"""Column indexes with their encoders."""


class _PreparedQuery:
    """A query's steps, with the encoders of their arguments and the decoders of their rows."""

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

    def encode_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of the parameters, with their values encoded for SQLite."""
        values = dict(params)
        for name, encode in self._params:
            if (value := values.get(name)) is not None:
                values[name] = encode(value)
        return values

    def _encoders(self, step: sql.SqliteStep) -> _Encoders:
        """Returns the columns that a step reads, with their encoders; JSON encodes ids itself."""
        columns = self.query.rows[step.rowset or ""]
        encoders = {index: _ENCODE.get(columns[index][1]) for index in step.uses}
        return [
            (index, None if step.whole and encode is _uuid_text else encode)
            for index, encode in encoders.items()
        ]

    def encode_rows(self, step: sql.SqliteStep, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns, for each row of a set, the encoded values of the columns that the step reads."""
        columns = self._columns[step.label]
        if len(rows) == 1:
            [row] = rows
            return [
                [
                    row[index] if encode is None or row[index] is None else encode(row[index])
                    for index, encode in columns
                ]
            ]
        uses = step.uses
        encoders = [(index, encode) for index, encode in columns if encode is not None]
        if not encoders:
            takes_all_columns = rows and len(uses) == len(rows[0])
            return (
                list(rows)
                if takes_all_columns
                else [[row[index] for index in uses] for row in rows]
            )
        encoded = []
        last: dict[int, tuple[Any, Any]] = {}  # rows of a set often share a value: encode it once
        for row in rows:
            full = list(row)
            for index, encode in encoders:
                value = full[index]
                if value is None:
                    continue
                previous = last.get(index)
                if previous is None or previous[0] is not value:
                    previous = last[index] = (value, encode(value))
                full[index] = previous[1]
            encoded.append([full[index] for index in uses])
        return encoded

    def decode(self, rows: "StepRows") -> Rows:
        """Returns the answer step's rows by column name; many rows are decoded at first access."""
        if rows.many:
            rows.decode = self._decode_rows
            return rows
        return self._decode_rows(rows.cells, rows.description)

    def _decode_rows(self, rows: list[Any], description: Any) -> list[Row]:
        """Returns the rows by column name; columns outside the query's answer stay encoded."""
        if not rows:
            return []
        if self._decoders is None:
            self._names = [column[0] for column in description]
            indexed = ((i, _decoder(name)) for i, name in enumerate(self._names))
            used_names = self.query.columns or self._names
            self._decoders = [
                (i, decode)
                for i, decode in indexed
                if decode is not None and self._names[i] in used_names
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


class StepRows(Rows):
    """Rows returned by a step, by position in `cells`; by name as the answer of a query.

    Many rows stay one JSON text until the first access: the event loop has more time to decode
    them than the writer thread.
    """

    decode: Callable[[list[Any], Any], list[Row]]

    def __init__(self, content: list[Any] | str, description: Any, *, many: bool = False) -> None:
        self._content = content
        self.description = description
        self.many = many
        self._decoded: list[Row] | None = None

    @property
    def cells(self) -> list[Any]:
        """The rows by position."""
        if isinstance(self._content, str):
            self._content = cast("list[Any]", msgspec.json.decode(self._content))
        return self._content

    def _rows(self) -> list[Row]:
        """Returns the rows by column name; decodes them at the first call."""
        if self._decoded is None:
            self._decoded = self.decode(self.cells, self.description)
        return self._decoded

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


_NO_ROWS = StepRows([], None)


class WriterBusy(Exception):
    """Another process holds SQLite's write lock."""


_MAX_PREPARED = 1000
"""Prepared statements that a connection caches: more than the program has."""
JSON_FROM_ROWS = 64
"""From this many rows on, a step returns its rows as one JSON text."""


class Connection:
    """One SQLite connection and the queries prepared for it. Used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self.raw = sqlite3.connect(
            path,
            isolation_level=None,
            check_same_thread=False,
            timeout=10,
            cached_statements=_MAX_PREPARED,
        )
        self._waits_for_writer = True
        self._require_own_database(path)
        if self.raw.execute("pragma journal_mode").fetchone()[0] != "wal":
            self.raw.execute("pragma journal_mode = wal")
        self.raw.execute("pragma synchronous = full")
        self.raw.execute("pragma wal_autocheckpoint = 4000")
        self.raw.execute("pragma cache_size = -16000")
        self._prepared: dict[Any, _PreparedQuery] = {}
        self._json_selects: dict[str, tuple[str, Any]] = {}

    def _require_own_database(self, path: str) -> None:
        """Closes the file and raises `Invalid` if it is the database of another program."""
        rows = self.raw.execute("select name from sqlite_master where type = 'table'")
        names = {row[0] for row in rows}
        if names and "schema_migration" not in names:
            self.raw.close()
            raise Invalid(
                f"{path} is a database of another program; choose another file", "database_invalid"
            )

    def begin(self, *, wait: bool) -> None:
        """Starts a write transaction; without `wait`, `WriterBusy` if another process writes."""
        if wait is not self._waits_for_writer:
            self.raw.execute(f"pragma busy_timeout = {10_000 if wait else 0}")
            self._waits_for_writer = wait
        try:
            self.raw.execute("begin immediate")
        except sqlite3.OperationalError as error:
            if wait or "locked" not in str(error):
                raise
            raise WriterBusy from error

    def prepare(self, statement: Statement) -> _PreparedQuery:
        """Returns the cached query for arguments of this shape; prepares it at the first use."""
        sizes = tuple([(name, min(len(rows), 2)) for name, rows in statement.rows.items()])
        present = [name for name, value in statement.params.items() if value is not None]
        literals = tuple(statement.literals.items())
        key = (statement.query, *present, literals, sizes)
        prepared = self._prepared.get(key)
        if prepared is None:
            query = sql.load(SQLITE)[statement.query]
            non_empty = {name for name, size in sizes if size > 0}
            single = frozenset(name for name, size in sizes if size == 1)
            switches = frozenset(present) | frozenset(statement.literals)
            prepared = _PreparedQuery(sql.variant(query, switches, literals, non_empty), single)
            sql.cache_put(self._prepared, key, prepared)
        return prepared

    @contextmanager
    def replace_invalid_text(self) -> Iterator[None]:
        """Reads text that is not UTF-8 with replacement characters, for a damaged row."""
        self.raw.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            yield
        finally:
            self.raw.text_factory = str

    def read(self, statement: Statement) -> list[Row]:
        """Runs a statement outside a transaction; returns its rows, with invalid UTF-8 replaced."""
        try:
            return list(self.run(statement))
        except sqlite3.OperationalError as error:
            if "UTF-8" not in str(error):
                raise
        with self.replace_invalid_text():
            return list(self.run(statement))

    def run(self, statement: Statement) -> Rows:
        """Runs the statement's steps in order; returns the rows of its answer step."""
        prepared = self.prepare(statement)
        values = prepared.encode_params(statement.params)
        returned: dict[str, StepRows] = {}
        for step in prepared.steps:
            param_values = tuple([values.get(name) for name in step.params]) if step.params else ()
            returned[step.label] = self._run_step(step, param_values, prepared, statement, returned)
        return prepared.decode(returned.get(prepared.query.answer, _NO_ROWS))

    def _run_step(
        self,
        step: sql.SqliteStep,
        param_values: tuple[Any, ...],
        prepared: _PreparedQuery,
        statement: Statement,
        returned: dict[str, StepRows],
    ) -> StepRows:
        """Runs one step and returns its rows; `returned` has the rows of the earlier steps."""
        if step.rowset is None and step.source is None:
            return self._execute(step, step.sql, param_values, statement.params.get("n") or 0)
        if step.flat:
            places = [row[step.uses[0]] for row in returned[step.source or ""].cells]
            if len(places) == 1 and step.one != step.sql:
                return self._execute(step, step.one, (*param_values, places[0]), 1)
            return self._execute(step, step.sql, (*param_values, _json(places)), len(places))
        if step.source is not None:
            uses = step.uses
            inputs = [[row[index] for index in uses] for row in returned[step.source].cells]
        else:
            rows = statement.rows[step.rowset or ""]
            if step.of is not None:
                ids = {row[0] for row in returned[step.of].cells}
                rows = [row for row in rows if _uuid_text(row[0]) in ids]
            inputs = prepared.encode_rows(step, rows)
        return self._run_with_rows(step, param_values, inputs)

    def _run_with_rows(
        self, step: sql.SqliteStep, param_values: tuple[Any, ...], inputs: list[Any]
    ) -> StepRows:
        """Runs a step over the rows of its set, as one JSON value or row by row."""
        if not inputs:
            return _NO_ROWS
        if step.whole:
            return self._execute(step, step.sql, (*param_values, _json(inputs)), len(inputs))
        fetched: list[tuple[Any, ...]] = []
        description = None
        execute = self.raw.execute
        for cells in inputs:
            cursor = execute(step.sql, (*param_values, *cells))
            if cursor.description is not None:
                fetched += cursor.fetchall()
                description = cursor.description
        return _NO_ROWS if description is None else StepRows(fetched, description)

    def _execute(
        self, step: sql.SqliteStep, text: str, arguments: tuple[Any, ...], expected_rows: int
    ) -> StepRows:
        """Runs one SQL text; fetches many expected rows as one JSON text if the step allows it."""
        as_json = step.in_one and expected_rows >= JSON_FROM_ROWS
        if as_json and (cached := self._json_selects.get(text)):
            json_select, description = cached
            with suppress(sqlite3.DataError):  # the text would be too long: read row by row
                [[fetched]] = self.raw.execute(json_select, arguments).fetchall()
                return StepRows(fetched, description, many=True)
        cursor = self.raw.execute(text, arguments)
        description = cursor.description
        if description is None:
            return _NO_ROWS
        fetched = cursor.fetchall()
        if as_json:  # its columns are known now
            json_select = sql.json_array_select(text, [column[0] for column in description])
            self._json_selects[text] = json_select, description
        return StepRows(fetched, description, many=as_json)
