"""The columns of new tasks, by part of the rows `body` (table `task_body`) and `hot` (`task`).

The columns of a request follow from the field table of `NewTask`; the others are listed here.
"""

from datetime import datetime
from typing import Literal, get_origin
from uuid import UUID

import msgspec

from tenuto.model.tasks.fields import Field, Part, value_type
from tenuto.model.tasks.submission import FIELDS

_SQL_TYPES = {str: "text", int: "bigint", bool: "boolean", UUID: "uuid", datetime: "timestamptz"}


class Column(msgspec.Struct, frozen=True):
    """A column with its SQL type, and the SQL value that an insert writes instead of null."""

    name: str
    sql_type: str
    default: str | None = None


_ENGINE_COLUMNS: dict[Part, tuple[Column, ...]] = {
    "body": (),
    "body.rare": (Column("rerun_of", "uuid"), Column("fingerprint", "text")),
    "body.placed": (
        Column("kind", "text", "'agent'"),
        Column("flow", "uuid"),
        Column("activation", "bigint"),
        Column("group_id", "uuid"),
        Column("slot", "bigint"),
        Column("follows", "uuid"),
        Column("context", "json"),
    ),
    "hot": (Column("lane", "bigint"), Column("status", "text"), Column("rank", "bigint")),
    "hot.timed": (Column("watch_s", "bigint"), Column("due_at", "timestamptz")),
    "hot.placed": (
        Column("hold", "text"),
        Column("unmet", "bigint", "0"),
        Column("watched", "boolean", "false"),
        Column("wait_until", "timestamptz"),
        Column("awaited", "bigint", "0"),
    ),
}
"""Columns that the engine sets, not the request."""


def sql_type(field: Field) -> str:
    """Returns the SQL type of a field's column; `json` for what is not a scalar."""
    if field.sql is not None:
        return field.sql
    type_ = value_type(field)
    return "text" if get_origin(type_) is Literal else _SQL_TYPES.get(type_, "json")


def _columns_of(part: Part) -> tuple[Column, ...]:
    """Returns the columns of one part: those of the engine, then those of the request."""
    requested = (field for field in FIELDS.values() if field.column == part)
    columns = tuple(Column(field.name, sql_type(field)) for field in requested)
    return _ENGINE_COLUMNS[part] + columns


COLUMNS: dict[str, tuple[Column, ...]] = {part: _columns_of(part) for part in _ENGINE_COLUMNS}
"""The columns of each part, in the order of the rows."""


def columns_of_rows(name: str) -> tuple[Column, ...]:
    """Returns the columns of all parts of the rows `body` or `hot`, in order."""
    parts = (columns for part, columns in COLUMNS.items() if part.partition(".")[0] == name)
    return tuple(column for columns in parts for column in columns)


MACROS = ("names", "values", "typed", "request", "cleared")


def expand(macro: str, argument: str) -> str:
    """Returns the SQL of one of `MACROS`; the argument names rows or a part of them.

    `{names:part}` and `{values:part}` are the two halves of an insert, `{typed:rows}` is for a
    header, `{request:rows}` selects what the caller set, `{cleared:body}` removes the payload.
    """
    table = argument.partition(".")[0]
    requested = [field for field in FIELDS.values() if (field.column or "").startswith(argument)]
    texts = {
        "names": lambda: [column.name for column in COLUMNS[argument]],
        "values": lambda: [_insert_value(table, column) for column in COLUMNS[argument]],
        "typed": lambda: [f"{col.name} {col.sql_type}" for col in columns_of_rows(argument)],
        "request": lambda: [f"{table}.{field.name}" for field in requested],
        "cleared": lambda: [f"{field.name} = null" for field in requested if field.payload],
    }
    return ", ".join(texts[macro]())


def _insert_value(table: str, column: Column) -> str:
    """Returns a column's SQL value in an insert from the rows `table`, its default for null."""
    name = f"{table}.{column.name}"
    return name if column.default is None else f"coalesce({name}, {column.default})"


def filter_conditions() -> str:
    """Returns the SQL of all equality filters, each used only if its parameter is given."""
    tables = {name: "task" if is_hot(field) else "body" for name, field in _filter_fields().items()}
    return "\n".join(f"[{name}: and {table}.{name} = :{name}]" for name, table in tables.items())


def filter_params() -> str:
    """Returns the parameters of `filter_conditions` with their types, for a header."""
    types = {name: sql_type(field) for name, field in _filter_fields().items()}
    return ", ".join(
        f"{name} {'bigint' if type_ == 'smallint' else type_}" for name, type_ in types.items()
    )


def _filter_fields() -> dict[str, Field]:
    """Returns the fields by name that lists of tasks can be filtered by, for equality."""
    return {name: field for name, field in FIELDS.items() if field.filter}


def is_hot(field: Field) -> bool:
    """True if the column of the field is in the table `task`."""
    return (field.column or "").startswith("hot")


def is_json(field: Field) -> bool:
    """True if the column of the field contains JSON."""
    return field.column is not None and sql_type(field) == "json"
