"""Shared handling of query results: one row or `NotFound`, one page, the version check."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar
from uuid import UUID

from tenuto.model.errors import Conflict, NotFound
from tenuto.store.protocol import Row


class _HasId(Protocol):
    @property
    def id(self) -> UUID: ...


V = TypeVar("V", bound=_HasId)


def require_one(rows: Sequence[Row], noun: str, name: UUID | str) -> Row:
    """Returns the first row; raises `NotFound` if there is none."""
    if not rows:
        raise NotFound(f"no {noun} {name}")
    return rows[0]


def page_of(
    rows: Sequence[Row], limit: int, view: Callable[[Row], V]
) -> tuple[list[V], UUID | None]:
    """Returns views of up to `limit` rows, and the id of the last if `rows` has more, else `None`.

    The query asked for `limit + 1` rows.
    """
    views = [view(row) for row in rows[:limit]]
    return views, views[-1].id if len(rows) > limit else None


def check_version(row: Row, version: int | None, noun: str, name: UUID | str) -> None:
    """Raises `Conflict` (`version_conflict`) if a version is given and the row has another one."""
    if version is not None and row["version"] != version:
        raise Conflict(
            f"{noun} {name} has version {row['version']}, not {version};"
            " read it again and repeat the change",
            "version_conflict",
        )
