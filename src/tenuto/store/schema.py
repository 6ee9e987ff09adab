"""Migrations: which there are, how each database spells them, and whether program and schema fit.

Rule: a database is refused when its `compat` is above what this program knows, or its schema below
what this program needs. A newer schema that says it is compatible runs.
"""

import re
from importlib import resources

import msgspec

from tenuto.model.errors import Incompatible

NEEDS = 8
"""The schema number this program needs."""
KNOWS = 4
"""The highest `compat` this program may run under."""

BOOKKEEPING = """
create table if not exists schema_migration (
  number bigint primary key, name text not null, compat bigint not null, applied_at text not null
)
"""

MARK = """
select current_database()::text, applied_at, xmin::text
from schema_migration order by number limit 1
"""
"""The question that two connections answer alike if, and only if, they are in one database.

A copy has the times of its original; its name differs on the same server, and on another one the
transaction (`xmin`) that wrote the row. Every login may read it.
"""


class Migration(msgspec.Struct, frozen=True):
    """One numbered step forward. `compat`: the oldest program knowledge that can live with it."""

    number: int
    name: str
    compat: int
    text: str


def migrations() -> list[Migration]:
    """All migrations in order. A file may say `-- compat: N`; else it is compatible with 1."""
    found = []
    for path in resources.files("tenuto.store").joinpath("migrations").iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", path.name):
            text = path.read_text()
            compat = re.search(r"^-- compat: (\d+)$", text, flags=re.M)
            found.append(Migration(int(match[1]), match[2], int(compat[1]) if compat else 1, text))
    return sorted(found, key=lambda migration: migration.number)


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
    """The migration's statements as `database` ("sqlite" or "postgres") spells them.

    They end with a semicolon; one inside a statement is written with a backslash before it.
    """
    other = "postgres" if database == "sqlite" else "sqlite"
    text = re.sub(rf"^-- only {other}$.*?^-- end only$", "", migration.text, flags=re.M | re.S)
    text = re.sub(r"^\s*--.*$", "", text, flags=re.M)
    if database == "sqlite":
        for name, spelled in _SQLITE_TYPES.items():
            text = re.sub(rf"(?<=\s){name}(?=[\s,);])", spelled, text)
        text = re.sub(r"^\)$", ") strict", text.replace(";", "\n;"), flags=re.M)
    epoch = "0" if database == "sqlite" else "to_timestamp(0)"
    text = text.replace("{epoch}", epoch)
    parts = (part.strip().replace("\\;", ";") for part in re.split(r"(?<!\\);", text))
    return [part for part in parts if part]


def check_fit(schema: int, compat: int) -> None:
    """Raise `Incompatible` unless this program may use a database with that schema."""
    if compat > KNOWS:
        raise Incompatible(
            f"the database has schema {schema}, which needs a newer program than this one;"
            " upgrade tenuto",
            "schema_newer",
        )
    if schema < NEEDS:
        raise Incompatible(
            f"the database has schema {schema} and this program needs {NEEDS};"
            " run `orchestrate db migrate`",
            "schema_older",
        )
