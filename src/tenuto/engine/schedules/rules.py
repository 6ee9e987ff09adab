"""The life cycle that schedules and triggers share: find, insert, change, pause, delete, compare.

A schedule or a trigger is a *rule*. A `RuleKind` has what differs between their tables.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID

from tenuto.engine.core import Core
from tenuto.engine.lookup import check_version, require_one
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid
from tenuto.store.protocol import Row, Script, Statement


class RuleKind(NamedTuple):
    """A kind of rule: its noun, the most that one workspace can have, and its queries."""

    noun: str
    max_rules: int
    page: str
    one: str
    locked: str
    by_name: str
    delete: str


class _Named(Protocol):
    @property
    def name(self) -> str: ...


D = TypeVar("D", bound=_Named)


class Rules:
    """The rules of one kind in one workspace, for one actor. A rule is named by name or id."""

    def __init__(self, kind: RuleKind, core: Core, workspace: UUID, actor: str | None) -> None:
        self._kind = kind
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def page(self, limit: int, cursor: UUID | None, name: str | None) -> Sequence[Row]:
        """Returns up to `limit + 1` rows, newest first; with `name`, only the row of this name."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        bounds.check_text("name", name or "", bounds.MAX_TEXT)
        params = {"name": name, "before": cursor, "most": limit + 1}
        return await self._core.store.fetch(self._statement(self._kind.page, params))

    async def find(self, rule: UUID | str) -> Row:
        """Returns the row of the rule with this id or name; raises `NotFound`."""
        id_ = parse_id(rule)
        if id_ is None:
            rows = (await self.page(1, None, str(rule)))[:1]
        else:
            rows = await self._core.store.fetch(self._statement(self._kind.one, {"id": id_}))
        return require_one(rows, self._kind.noun, rule)

    async def change(
        self,
        rule: UUID | str,
        write: Callable[[Row], Script[None]],
        *,
        version: int | None = None,
    ) -> UUID:
        """Locks a rule, runs `write` with its row, returns its id; raises `NotFound`, `Conflict`.

        `Conflict` (`version_conflict`): the rule no longer has the given version.
        """
        id_: UUID = (await self.find(rule))["id"]

        def script() -> Script[None]:
            rows = yield self._statement(self._kind.locked, {"id": id_})
            row = require_one(rows, self._kind.noun, rule)
            check_version(row, version, self._kind.noun, rule)
            yield from write(row)

        await self._core.store.transact(script)
        return id_

    async def delete(self, rule: UUID | str) -> None:
        """Deletes a rule, but not its events; raises `NotFound`."""
        params = {"id": (await self.find(rule))["id"]}
        params |= {"actor": self._actor, "now": self._core.now()}

        def script() -> Script[None]:
            rows = yield self._statement(self._kind.delete, params)
            require_one(rows, self._kind.noun, rule)

        await self._core.store.transact_one(script)

    def require_free_name(self, name: str) -> Script[None]:
        """Raises `Conflict` if a rule of the workspace has the name."""
        if (yield from self.lock_by_name([name])):
            text = f"{self._kind.noun} {name!r} already exists; choose another name"
            raise Conflict(text, "name_taken")

    def insert(self, name: str, statement: Statement) -> Script[None]:
        """Runs the insert of a rule; `Conflict` if the name is taken, `Invalid` if too many.

        The statement returns no row in these cases.
        """
        if (yield statement):
            return
        yield from self.require_free_name(name)
        noun, maximum = self._kind.noun, self._kind.max_rules
        text = f"the workspace has {maximum:,} {noun}s, the maximum; delete one first"
        raise Invalid(text, "too_large")

    def lock_by_name(self, names: Sequence[str]) -> Script[dict[str, Row]]:
        """Locks and returns the rows of the existing rules with these names, by name."""
        rows = yield self._statement(self._kind.by_name, {"names": sorted(names)})
        return {row["name"]: row for row in rows}

    def lock_and_compare(
        self, requested: Sequence[D], differs: Callable[[Row, D], bool]
    ) -> Script[tuple[dict[str, str], dict[str, Row]]]:
        """Locks rules; returns by name `created`, `updated` or `unchanged`, and the stored rows."""
        stored = yield from self.lock_by_name([desired.name for desired in requested])
        actions = {}
        for desired in requested:
            row = stored.get(desired.name)
            if row is None:
                actions[desired.name] = "created"
            else:
                actions[desired.name] = "updated" if differs(row, desired) else "unchanged"
        return actions, stored

    def check_status(self, rule: UUID | str, status: str, required: str, action: str) -> None:
        """Raises `Conflict` if the status is not `required`; `action` is `paused` or `resumed`."""
        if status != required:
            article = "an" if required == "ACTIVE" else "a"
            text = f"{self._kind.noun} {rule} is {status}; only {article} {required} one"
            raise Conflict(f"{text} can be {action}")

    def _statement(self, query: str, params: dict[str, Any]) -> Statement:
        return Statement(query, {"workspace": self._workspace} | params)


def parse_id(name: UUID | str) -> UUID | None:
    """Returns the id if the text is one; `None` for a name."""
    if isinstance(name, UUID):
        return name
    try:
        return UUID(name)
    except ValueError:
        return None
