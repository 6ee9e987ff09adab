"""Checks who is allowed to use a named secret: when a caller names it, and at each claim."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.activation import ADDED_SLOT_BASE
from tenuto.engine.rows import decode_json
from tenuto.model.errors import Forbidden
from tenuto.model.flows.plan import Spec
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.access import Caller, Role
from tenuto.model.tenancy.secret_use import (
    UNRESTRICTED,
    Use,
    claim_error,
    reference_error,
    referenced_secrets,
    role_for_secrets,
)
from tenuto.model.tenancy.secrets import definition_secret_names, referenced_names
from tenuto.store.protocol import Row, Script, Statement

_DECISIVE_FIELDS = (
    *("title", "description", "metadata"),  # sessions receive them
    *("prompt", "system_prompt", "model", "task_type", "agent_type", "target_agent", "runtime"),
    *("command", "cwd", "env", "input", "container", "control"),
)
"""The fields of a definition that decide what runs with its secrets."""


class Claimant(NamedTuple):
    """The agent that claims, and the caller; `None` means a program on the database itself."""

    agent: UUID
    caller: Caller | None


def parse_use(text: str | None) -> Use:
    """Returns the usage rule in a column of a secret's row; `None` there: no restriction."""
    return UNRESTRICTED if text is None else msgspec.json.decode(text, type=Use)


def check_value(workspace: UUID, caller: Caller | None, value: Any) -> Script[None]:
    """Raises `Forbidden` if a JSON value names a secret for a higher role than the caller's."""
    if role_for_secrets(caller) < Role.OWNER:
        yield from _check_named(workspace, caller, definition_secret_names(value))


def check_tasks(
    workspace: UUID, caller: Caller | None, new_tasks: Iterable[NewTask]
) -> Script[None]:
    """Raises `Forbidden` if tasks name a secret for a higher role than the caller's."""
    if role_for_secrets(caller) < Role.OWNER:
        yield from _check_named(
            workspace, caller, set[str]().union(*map(referenced_secrets, new_tasks))
        )


def check_definitions(
    workspace: UUID, caller: Caller | None, specs: Iterable[Spec], keys: Iterable[str]
) -> Script[None]:
    """Raises `Forbidden` if specs or keys give access to secrets for a role above the caller's."""
    if role_for_secrets(caller) == Role.OWNER:
        return
    yield from check_tasks(workspace, caller, [spec for spec in specs if isinstance(spec, NewTask)])
    written = set(keys)
    for name, use in (yield from _load_restricted(workspace)).items():
        # The secret trusts the definition, so a MEMBER must not change it.
        required = max(use.min_role, Role.ADMIN)
        if role_for_secrets(caller) < required and (trusted := written & set(use.definitions)):
            raise Forbidden(
                f"the definition {min(trusted)!r} has access to the secret {name!r}:"
                f" changing it requires the role {required.name}",
                "secret_forbidden",
            )


def _check_named(workspace: UUID, caller: Caller | None, names: set[str]) -> Script[None]:
    """Raises `Forbidden` if one of the named secrets is for a higher role than the caller's."""
    if not names:
        return
    uses = yield from _load_restricted(workspace)
    for name in sorted(names & uses.keys()):
        if (error := reference_error(name, uses[name], caller)) is not None:
            raise error


def _load_restricted(workspace: UUID) -> Script[dict[str, Use]]:
    """Returns the rules of the workspace's restricted secrets, by name."""
    rows = yield Statement("secrets_restricted", {"workspace": workspace})
    return {row["name"]: parse_use(row["use"]) for row in rows}


async def secret_errors(
    core: Core, rows: Sequence[Row], stored: Mapping[str, Row], claimant: Claimant
) -> dict[UUID, Forbidden]:
    """Returns an error for each claimed task that is not allowed to receive a secret it names.

    The errors are by task id. `stored` has the rows of the secrets by name.
    """
    uses = {name: parse_use(row["use"]) for name, row in stored.items() if row["use"] is not None}
    if not uses:
        return {}
    agent = await core.read(_load_agent_name(rows[0]["workspace"], claimant.agent))
    errors: dict[UUID, Forbidden] = {}
    for row in rows:
        for name in sorted(
            referenced_names([decode_json(row["input"]), decode_json(row["env"])]) & uses.keys()
        ):
            use = uses[name]
            is_defined = bool(use.definitions) and await core.read(
                _is_defined(core, row, name, use)
            )
            error = claim_error(name, use, claimant.caller, agent, is_defined=is_defined)
            if error is not None:
                errors[row["id"]] = error
                break
    return errors


def _load_agent_name(workspace: UUID, agent: UUID) -> Script[str | None]:
    """Returns the agent's name; `None` if there is no such agent."""
    rows = yield Statement("agent", {"workspace": workspace, "id": agent})
    return rows[0]["name"] if rows else None


def _is_defined(core: Core, row: Row, name: str, use: Use) -> Script[bool]:
    """True if a task equals its current definition, and the secret is named in that definition.

    The definition must be one that the secret allows. A task that a flow activated from its plan
    equals the plan; a task that was added to the flow later, or edited by a user, does not.
    """
    key, flow = row["key"], row["flow"]
    if flow is None or key not in use.definitions:
        return False
    workspace = row["workspace"]
    [position] = yield Statement("flow_positions", rows={"wanted": [(row["id"], workspace)]})
    definitions = yield Statement(
        "definition_specs", {"workspace": workspace, "keys": [key], "most": 1}
    )
    planned = (yield from core.plans.load_plan(flow)).tasks.get(key)
    if (
        planned is None
        or position["slot"] > ADDED_SLOT_BASE
        or not definitions
        or definitions[0]["kind"] != "task"
    ):
        return False
    stored = msgspec.json.decode(definitions[0]["spec"], type=NewTask)
    if not has_same_execution(planned, stored):
        return False
    if (yield Statement("task_edited", {"workspace": workspace, "id": row["id"]})):
        return False
    # The input can be that of the flow, or contain an item of a foreach: other callers can name
    # secrets there.
    in_input = referenced_names(decode_json(row["input"]))
    return name not in in_input or name in referenced_names(stored.input)


def has_same_execution(one: NewTask, other: Spec | None) -> bool:
    """True if two specs agree in all fields that decide what runs and which input it gets."""
    return isinstance(other, NewTask) and _decisive_json(one) == _decisive_json(other)


def _decisive_json(spec: NewTask) -> bytes:
    """Returns the fields that decide what runs, as JSON."""
    return msgspec.json.encode(
        {field: getattr(spec, field) for field in _DECISIVE_FIELDS}, order="deterministic"
    )
