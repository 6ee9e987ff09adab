"""Migrations: their list, their text for each database, and the check of program and schema.

Rule: a database is refused when its `compat` is above `MAX_COMPAT`, or its schema number is below
`REQUIRED_SCHEMA`. A newer schema whose `compat` is low enough is accepted.
"""

import re
from importlib import resources

import msgspec

from tenuto.model.errors import Incompatible

REQUIRED_SCHEMA = 8
"""The lowest schema number that this program can use."""
MAX_COMPAT = 4
"""The highest `compat` of a database that this program can use."""

MIGRATION_TABLE = """
create table if not exists schema_migration (
  number bigint primary key, name text not null, compat bigint not null, applied_at text not null
)
"""

FINGERPRINT_QUERY = """
select current_database()::text, applied_at, xmin::text
from schema_migration order by number limit 1
"""
"""Two connections get the same answer if, and only if, they are in one database.

A copy has the times of its original. Its name differs on the same server; on another server the
transaction (`xmin`) that wrote the row differs. Every login may read it.
"""


class Migration(msgspec.Struct, frozen=True):
    """One numbered migration. `compat`: the lowest `MAX_COMPAT` of a program that can use it."""

    number: int
    name: str
    compat: int
    text: str


def migrations() -> list[Migration]:
    """Reads all migration files, ordered by number; `compat` is 1 without a line `-- compat: N`."""
    numbered = []
    for path in resources.files("tenuto.store").joinpath("migrations").iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", path.name):
            text = path.read_text()
            compat = re.search(r"^-- compat: (\d+)$", text, flags=re.M)
            numbered.append(
                Migration(int(match[1]), match[2], int(compat[1]) if compat else 1, text)
            )
    return sorted(numbered, key=lambda migration: migration.number)


_SQLITE_TYPES = {
    "uuid": "text",
    "timestamptz": "integer",
    "json": "text",
    "bigint": "integer",
    "smallint": "integer",
    "boolean": "integer",
    "double precision": "real",
}


def statements(migration: Migration, database: str) -> list[str]:
    """Returns the migration's statements for `database` ("sqlite" or "postgres").

    Statements end with a semicolon; inside a statement it has a backslash before it.
    """
    other = "postgres" if database == "sqlite" else "sqlite"
    text = re.sub(rf"^-- only {other}$.*?^-- end only$", "", migration.text, flags=re.M | re.S)
    text = re.sub(r"^\s*--.*$", "", text, flags=re.M)
    if database == "sqlite":
        for name, sqlite_type in _SQLITE_TYPES.items():
            text = re.sub(rf"(?<=\s){name}(?=[\s,);])", sqlite_type, text)
        text = re.sub(r"^\)$", ") strict", text.replace(";", "\n;"), flags=re.M)
    epoch = "0" if database == "sqlite" else "to_timestamp(0)"
    text = text.replace("{epoch}", epoch)
    parts = (part.strip().replace("\\;", ";") for part in re.split(r"(?<!\\);", text))
    return [part for part in parts if part]


def check_fit(schema: int, compat: int) -> None:
    """Raises `Incompatible` unless this program can use a database with that schema."""
    if compat > MAX_COMPAT:
        raise Incompatible(
            f"the database has schema {schema}, which needs a newer program than this one;"
            " upgrade tenuto",
            "schema_newer",
        )
    if schema < REQUIRED_SCHEMA:
        raise Incompatible(
            f"the database has schema {schema} and this program needs {REQUIRED_SCHEMA};"
            " run `orchestrate db migrate`",
            "schema_older",
        )


def missing_column_error(error: Exception) -> Incompatible:
    """Returns the error `schema_older`, for a query with a table or column the database lacks."""
    [text, *_] = str(error).splitlines()
    return Incompatible(
        f"the database schema is older than this program: {text}; run `orchestrate db migrate`",
        "schema_older",
    )
