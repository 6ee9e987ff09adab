"""Who may use a named secret: asked when somebody names one, and again at each claim."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.activation import LATECOMERS
from tenuto.engine.rows import decode
from tenuto.model.errors import Forbidden
from tenuto.model.flows.plan import Spec
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.access import Caller, Role
from tenuto.model.tenancy.secret_use import (
    ANYBODY,
    Use,
    claim_refusal,
    named_by,
    naming_refusal,
    role_of,
)
from tenuto.model.tenancy.secrets import named, references
from tenuto.store.protocol import Row, Script, Statement

_DECIDES = (
    *("title", "description", "metadata"),  # sessions are told them
    *("prompt", "system_prompt", "model", "task_type", "agent_type", "target_agent", "runtime"),
    *("command", "cwd", "env", "input", "container", "control"),
)
"""The fields of a definition that decide what runs with its secrets."""


class Claimant(NamedTuple):
    """Who claims: the agent that gets the task, and the caller; none is the database itself."""

    agent: UUID
    caller: Caller | None


def use_of(text: str | None) -> Use:
    """Returns the rule in a row."""
    return ANYBODY if text is None else msgspec.json.decode(text, type=Use)


def check_value(workspace: UUID, caller: Caller | None, value: Any) -> Script[None]:
    """Raise `Forbidden` if a JSON value names a secret for a higher role than the caller's."""
    if role_of(caller) < Role.OWNER:
        yield from _check_named(workspace, caller, named(value))


def check_tasks(workspace: UUID, caller: Caller | None, news: Iterable[NewTask]) -> Script[None]:
    """Raise `Forbidden` if tasks name a secret for a higher role than the caller's."""
    if role_of(caller) < Role.OWNER:
        yield from _check_named(workspace, caller, set[str]().union(*map(named_by, news)))


def check_definitions(
    workspace: UUID, caller: Caller | None, specs: Iterable[Spec], keys: Iterable[str]
) -> Script[None]:
    """Raise `Forbidden` unless the caller may write these definitions under these keys."""
    if role_of(caller) == Role.OWNER:
        return
    yield from check_tasks(workspace, caller, [each for each in specs if isinstance(each, NewTask)])
    wanted = set(keys)
    for name, use in (yield from _restricted(workspace)).items():
        # The definition is what the secret trusts, so what it says is no MEMBER's to change.
        needed = max(use.least, Role.ADMIN)
        if role_of(caller) < needed and (known := wanted & set(use.definitions)):
            raise Forbidden(
                f"the definition {min(known)!r} may use the secret {name!r}:"
                f" changing it needs the role {needed.name}",
                "secret_forbidden",
            )


def _check_named(workspace: UUID, caller: Caller | None, names: set[str]) -> Script[None]:
    if not names:
        return
    uses = yield from _restricted(workspace)
    for name in sorted(names & uses.keys()):
        if (error := naming_refusal(name, uses[name], caller)) is not None:
            raise error


def _restricted(workspace: UUID) -> Script[dict[str, Use]]:
    rows = yield Statement("secrets_restricted", {"workspace": workspace})
    return {row["name"]: use_of(row["use"]) for row in rows}


async def refusals(
    core: Core, rows: Sequence[Row], stored: Mapping[str, Row], claimant: Claimant
) -> dict[UUID, Forbidden]:
    """Returns why claimed tasks are not handed the secrets they name, for those that are not.

    `stored` has the rows of the secrets by name.
    """
    uses = {name: use_of(row["use"]) for name, row in stored.items() if row["use"] is not None}
    if not uses:
        return {}
    agent = await core.read(_agent_name(rows[0]["workspace"], claimant.agent))
    found: dict[UUID, Forbidden] = {}
    for row in rows:
        for name in sorted(references([decode(row["input"]), decode(row["env"])]) & uses.keys()):
            use = uses[name]
            defined = bool(use.definitions) and await core.read(_is_defined(core, row, name, use))
            error = claim_refusal(name, use, claimant.caller, agent, defined=defined)
            if error is not None:
                found[row["id"]] = error
                break
    return found


def _agent_name(workspace: UUID, agent: UUID) -> Script[str | None]:
    rows = yield Statement("agent", {"workspace": workspace, "id": agent})
    return rows[0]["name"] if rows else None


def _is_defined(core: Core, row: Row, name: str, use: Use) -> Script[bool]:
    """Returns whether a task is what one of the definitions says now, and the secret stands there.

    A task that a flow made of its plan is what the plan says; one that joined the flow, or that
    people changed since, is not.
    """
    key, flow = row["key"], row["flow"]
    if flow is None or key not in use.definitions:
        return False
    workspace = row["workspace"]
    [place] = yield Statement("places", rows={"wanted": [(row["id"], workspace)]})
    known = yield Statement("definition_specs", {"workspace": workspace, "keys": [key], "most": 1})
    planned = (yield from core.plans.plan(flow)).tasks.get(key)
    if planned is None or place["slot"] > LATECOMERS or not known or known[0]["kind"] != "task":
        return False
    stored = msgspec.json.decode(known[0]["spec"], type=NewTask)
    if not runs_the_same(planned, stored):
        return False
    if (yield Statement("task_reworded", {"workspace": workspace, "id": row["id"]})):
        return False
    # An input may be the flow's, or have an item of a foreach in it, where others name secrets.
    said = references(decode(row["input"]))
    return name not in said or name in references(stored.input)


def runs_the_same(one: NewTask, other: Spec | None) -> bool:
    """True if two specs agree in all that decides what runs and what it is told."""
    return isinstance(other, NewTask) and _decisive(one) == _decisive(other)


def _decisive(spec: NewTask) -> bytes:
    return msgspec.json.encode(
        {field: getattr(spec, field) for field in _DECIDES}, order="deterministic"
    )
