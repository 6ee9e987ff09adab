"""Finds steps of queries that touch a tenant's table without naming the workspace.

A part of a step (a select, an update, a delete, each side of a union) is bound to a workspace if it
compares a `workspace` column with the caller's, or with that of a row that is handed in, if it goes
by rows that a bound part found, or if it refers to a row of the part around it.

SQLite's spelling is read: PostgreSQL has row policies besides.
"""

import re
import sqlite3

from tenuto.store import schema, sql

_NAMES = re.compile(
    r"\b(?:from|join|update)\s+(\w+)(?:\s+(?:as\s+)?(?!(?:set|on|where|join|cross|left)\b)(\w+))?"
)
_INSERT = re.compile(r"insert into (\w+)\s*\(([^)]*)\)")
_CONFLICT = re.compile(r"on conflict\s*(?:\(([^)]*)\))?\s*do update(.*)", flags=re.S)
_SELECT = re.compile(r"\((?=\s*(?:select|with)\b)")
_UNION = re.compile(r"\bunion(?: all)?\b")
_MARK = re.compile(r"§(\d+)§")
_SOURCE = re.compile(r"(?:from|join|\bin|=)\s*§(\d+)§")
_GROUP = re.compile(r"\([^()]*\)")
_WHERE = re.compile(r"\bwhere\b")
_OR = re.compile(r"\bor\b")


def tenant_tables() -> frozenset[str]:
    """Every table with a `workspace` column."""
    created = sqlite3.connect(":memory:")
    for migration in schema.migrations():
        for statement in schema.statements(migration, "sqlite"):
            created.execute(statement)
    result = created.execute(
        "select t.name from sqlite_master t, pragma_table_info(t.name) c"
        " where t.type = 'table' and c.name = 'workspace'"
    ).fetchall()
    created.close()
    return frozenset(name for (name,) in result)


def unbound(query: sql.Query, tables: frozenset[str]) -> list[str]:
    """The steps of a query that touch one of the tables and are not bound to a workspace."""
    bound: list[str] = []
    missing: list[str] = []
    for step in query.steps:
        is_bound = _Step(list(query.rows), bound, tables).is_bound(step.text)
        (bound if is_bound else missing).append(step.label)
    return missing


class _Step:
    """One step, taken apart at the parentheses around its selects."""

    def __init__(self, sets: list[str], bound: list[str], tables: frozenset[str]) -> None:
        self._tables = tables
        handed_in = "|".join([*sets, "-"])
        result = "|".join([*bound, "-"])
        self._bound = re.compile(
            rf"\bworkspace\s*(?:=\s*(?:(?:{handed_in})\.workspace\b|:workspace\b)|in\s*(?:§|\(:))"
            rf"|\{{(?:places:)?(?:{result})\}}|of (?:{result})\}}"
        )
        self._parts: list[str] = []
        self._common: frozenset[str] = frozenset()

    def is_bound(self, text: str) -> bool:
        self._common = frozenset(re.findall(r"(?:recursive|with|,)\s+(\w+)\([^)]*\) as", text))
        if created := _INSERT.match(text):
            table, columns = created[1], re.findall(r"\w+", created[2])
            if table in self._tables and not ("workspace" in columns and _keeps(table, text)):
                return False
            text = text[created.end() :]
        return self._all_bound(text, frozenset())

    def _all_bound(self, text: str, around: frozenset[str]) -> bool:
        sides = _UNION.split(self._closed(text))
        return all(self._side_is_bound(side, around) for side in sides)

    def _closed(self, text: str) -> str:
        """The text with a mark in the place of each select in parentheses."""
        result, at = "", 0
        while match := _SELECT.search(text, at):
            end = _closing(text, match.start())
            self._parts.append(text[match.end() : end])
            result += f"{text[at : match.start()]}§{len(self._parts) - 1}§"
            at = end + 1
        return result + text[at:]

    def _side_is_bound(self, text: str, around: frozenset[str]) -> bool:
        names = _NAMES.findall(text)
        own = {alias or table for table, alias in names}
        inside = [self._parts[int(mark)] for mark in _MARK.findall(text)]
        if not all(self._all_bound(part, around | own) for part in inside):
            return False
        if not any(table in self._tables for table, _ in names):
            return True
        if _is_choice(text):
            return False  # rows that meet the other condition need not be the workspace's
        return (
            self._finds(text)
            or any(re.search(rf"\b{name}\.", text) for name in around - own)
            or any(table in self._common for table, _ in names)
        )

    def _finds(self, text: str) -> bool:
        """True if a side finds bound rows itself, or by a select that does."""
        if self._bound.search(text):
            return True
        sources = [self._parts[int(mark)] for mark in _SOURCE.findall(text)]
        return any(self._finds(self._closed(part)) for part in sources)


def _is_choice(text: str) -> bool:
    """True if rows of a side need to meet only one of several conditions."""
    while (inner := _GROUP.sub("", text)) != text:
        text = inner
    _, *conditions = _WHERE.split(text)
    return any(map(_OR.search, conditions))


def _keeps(table: str, text: str) -> bool:
    """True if an insert that conflicts changes only a row of its own workspace."""
    met = _CONFLICT.search(text)
    own = f"{table}.workspace = excluded.workspace"
    return met is None or "workspace" in (met[1] or "") or own in met[2]


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise AssertionError("parentheses do not match")
