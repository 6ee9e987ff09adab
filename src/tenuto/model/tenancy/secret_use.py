"""Rules for named secrets: the roles, agents and definitions that may use them."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Forbidden, Invalid
from tenuto.model.flows.definition import Foreach, check_key
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.access import Caller, Role
from tenuto.model.tenancy.secrets import definition_secret_names


class Use(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule for one secret. An empty list allows any agent or any task."""

    role: Literal["MEMBER", "ADMIN", "OWNER"] = "MEMBER"
    agents: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()

    @property
    def min_role(self) -> Role:
        """The lowest role that may refer to the secret and claim tasks that use it."""
        return Role[self.role]


UNRESTRICTED = Use()


def check_use(use: Use) -> None:
    """Raises `Invalid` unless all names in the rule are valid."""
    for field, items in (("use.agents", use.agents), ("use.definitions", use.definitions)):
        if len(items) > bounds.MAX_TAGS:
            raise Invalid(f"{field} has more than {bounds.MAX_TAGS} entries", "too_large")
        for item in items:
            bounds.check_text(field, item, bounds.MAX_NAME, empty=False)
    for key in use.definitions:
        check_key("use.definitions", key)


def role_for_secrets(caller: Caller | None) -> Role:
    """Returns the role that a caller counts as for secrets.

    An agent's token counts as MEMBER at most; `None`, direct database access, counts as OWNER.
    """
    if caller is None:
        return Role.OWNER
    return caller.role if caller.agent is None else min(caller.role, Role.MEMBER)


def referenced_secrets(new: NewTask) -> set[str]:
    """Returns the names of the secrets that a task's input, `env` and items refer to."""
    items = new.control.items if isinstance(new.control, Foreach) else None
    return definition_secret_names([new.input, dict(new.env or {}), items])


def reference_error(name: str, use: Use, caller: Caller | None) -> Forbidden | None:
    """Returns the error if the caller's role is too low to refer to the secret, else `None`."""
    if role_for_secrets(caller) >= use.min_role:
        return None
    return Forbidden(f"the secret {name!r} requires the role {use.role}", "secret_forbidden")


def claim_error(
    name: str, use: Use, caller: Caller | None, agent: str | None, *, is_defined: bool
) -> Forbidden | None:
    """Returns the error if the claim must not receive the secret, else `None`.

    `agent` is the agent name that the task was claimed as. `is_defined` is true if the task belongs
    to one of `use.definitions` in its current version, and that version refers to the secret.
    """
    has_agent_token = caller is not None and caller.agent is not None
    is_listed = agent in use.agents
    role = role_for_secrets(caller)
    reason = None
    if use.agents and not is_listed:
        reason = f"is for agents {_join_names(use.agents)}, but the task was claimed as {agent}"
    elif use.agents and not has_agent_token and role < Role.ADMIN:
        reason = (
            f"is for agents {_join_names(use.agents)}: claim as {agent} with the agent's own token"
        )
    elif role < use.min_role and not (has_agent_token and is_listed):
        reason = f"requires the role {use.role}, but the task was claimed with the role {role.name}"
    elif use.definitions and not is_defined:
        reason = f"is for tasks of the current definitions {_join_names(use.definitions)}"
    return (
        None if reason is None else Forbidden(f"the secret {name!r} {reason}", "secret_forbidden")
    )


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(names)
