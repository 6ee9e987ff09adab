"""Who may use a named secret: which roles, agents and definitions."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Forbidden, Invalid
from tenuto.model.flows.definition import Foreach, check_key
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.access import Caller, Role
from tenuto.model.tenancy.secrets import named


class Use(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may use a secret. An empty list means any agent, or any task."""

    role: Literal["MEMBER", "ADMIN", "OWNER"] = "MEMBER"
    agents: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()

    @property
    def least(self) -> Role:
        """The lowest role that may name the secret and claim its tasks."""
        return Role[self.role]


ANYBODY = Use()


def check_use(use: Use) -> None:
    """Raise `Invalid` unless the rule can be kept."""
    for field, items in (("use.agents", use.agents), ("use.definitions", use.definitions)):
        if len(items) > bounds.MAX_TAGS:
            raise Invalid(f"{field} has more than {bounds.MAX_TAGS} entries", "too_large")
        for item in items:
            bounds.text(field, item, bounds.MAX_NAME, empty=False)
    for key in use.definitions:
        check_key("use.definitions", key)


def role_of(caller: Caller | None) -> Role:
    """Returns the role a caller counts as: an agent's token as MEMBER, the database as OWNER."""
    if caller is None:
        return Role.OWNER
    return caller.role if caller.agent is None else min(caller.role, Role.MEMBER)


def named_by(new: NewTask) -> set[str]:
    """Returns the secrets that a task or its definition names."""
    items = new.control.items if isinstance(new.control, Foreach) else None
    return named([new.input, dict(new.env or {}), items])


def naming_refusal(name: str, use: Use, caller: Caller | None) -> Forbidden | None:
    """Returns the error for a caller whose role is too low to name the secret."""
    if role_of(caller) >= use.least:
        return None
    return Forbidden(f"the secret {name!r} is for the role {use.role}", "secret_forbidden")


def claim_refusal(
    name: str, use: Use, caller: Caller | None, agent: str | None, *, defined: bool
) -> Forbidden | None:
    """Returns the error for a claim that is not handed the secret.

    `agent` is the name the task was claimed as; `defined` says whether the task is one of
    `use.definitions` as that is now, and the secret is named there.
    """
    own = caller is not None and caller.agent is not None
    listed = agent in use.agents
    role = role_of(caller)
    why = None
    if use.agents and not listed:
        why = f"is for agents {_listed(use.agents)}, and the task was claimed as {agent}"
    elif use.agents and not own and role < Role.ADMIN:
        why = f"is for agents {_listed(use.agents)}: claim as {agent} with the agent's own token"
    elif role < use.least and not (own and listed):
        why = f"is for the role {use.role}, and the task was claimed with a token of {role.name}"
    elif use.definitions and not defined:
        why = f"is for tasks of the definitions {_listed(use.definitions)} as they are now"
    return None if why is None else Forbidden(f"the secret {name!r} {why}", "secret_forbidden")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
