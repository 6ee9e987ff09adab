"""`RemoteEngine` has the methods of `Engine`, with the same parameters."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from tenuto.client.remote import engine as far
from tenuto.client.remote import generated
from tenuto.client.remote.definitions import RemoteDefinitions
from tenuto.client.remote.flows import RemoteFlows, RemoteInbox
from tenuto.client.remote.limits import RemotePauses, RemoteRateLimits
from tenuto.client.remote.mailbox import RemoteMailboxes
from tenuto.client.remote.schedules import RemoteSchedules, RemoteTriggers
from tenuto.engine.agents.inbox import Inbox
from tenuto.engine.agents.mailbox import Mailboxes
from tenuto.engine.engine import Engine
from tenuto.engine.flows.definitions import Definitions
from tenuto.engine.flows.start import Flows
from tenuto.engine.flows.views import FlowViews
from tenuto.engine.limits.complexity import ComplexityLevels
from tenuto.engine.limits.pauses import Pauses
from tenuto.engine.limits.rate_limits import RateLimits
from tenuto.engine.schedules.schedules import Schedules
from tenuto.engine.schedules.triggers import Triggers
from tenuto.engine.tenancy.secrets import NamedSecrets

PAIRS: list[tuple[type, type]] = [
    (Engine, far.RemoteEngine),
    (ComplexityLevels, far.RemoteComplexity),
    (Definitions, RemoteDefinitions),
    (Flows, RemoteFlows),
    (FlowViews, RemoteFlows),
    (Inbox, RemoteInbox),
    (Mailboxes, RemoteMailboxes),
    (NamedSecrets, far.RemoteSecrets),
    (Pauses, RemotePauses),
    (RateLimits, RemoteRateLimits),
    (Schedules, RemoteSchedules),
    (Triggers, RemoteTriggers),
]
NEAR_ONLY = {
    "agents over HTTP call them": "Engine.begin Engine.claimed Engine.heartbeat",
    "they are parts of other methods": """
        Definitions.apply Definitions.load_reachable Flows.add_to_group Flows.build_plan
        Flows.check_quota Flows.find_open_group Flows.prepare Flows.rerun Flows.start_plan
        Flows.start_prepared Flows.submit_as_flow FlowViews.start_args Mailboxes.count_waiting
        Schedules.compare Schedules.put Triggers.compare Triggers.put
    """,
    "it is a duty": "Flows.run_deferred_once",
}
"""Methods of the engine that no client has, by the reason."""
NEAR_PARAMETERS = {
    "Engine.register_agent": {"managed"},  # an agent that registers itself is not managed
    "Engine.record_worker": {"registered_by"},  # the server knows whose token it is
    "Flows.start": {"source", "fire_key"},  # set by schedules and triggers
}


def methods(kind: type) -> dict[str, Any]:
    """The public methods of a class and of its bases."""
    return {
        name: method
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if name[0] != "_"
    }


def expected() -> Iterator[tuple[str, Any, type]]:
    """Each method of the engine that is promised over HTTP, with the class that must have it."""
    near_only = " ".join(NEAR_ONLY.values()).split()
    for near, remote in PAIRS:
        for name, method in methods(near).items():
            if f"{near.__name__}.{name}" not in near_only:
                yield f"{near.__name__}.{name}", method, remote


def parameters(method: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize(
    ("name", "method", "remote"), [pytest.param(*case, id=case[0]) for case in expected()]
)
def test_engine_method_is_remote_with_the_same_parameters(
    name: str, method: Any, remote: type
) -> None:
    left_out = NEAR_PARAMETERS.get(name, set())
    own = [item for item in parameters(method) if item[0] not in left_out]
    remote_method = methods(remote).get(name.partition(".")[2])
    assert remote_method, (
        f"{remote.__name__} has no {name}: give its route `remote=`, or write it by hand"
    )
    assert parameters(remote_method) == own


def test_remote_methods_are_methods_of_the_engine() -> None:
    promised: dict[type, set[str]] = {}
    for near, remote in PAIRS:
        promised.setdefault(remote, set()).update(methods(near))
    for remote, names in promised.items():
        assert set(methods(remote)) <= names, remote


def test_every_part_of_the_engine_is_compared() -> None:
    parts = {
        part.fget.__annotations__["return"]
        for part in vars(Engine).values()
        if isinstance(part, property)
    }
    names = {part if isinstance(part, str) else part.__name__ for part in parts}
    assert names - {"Clock", "bool"} == {near.__name__ for near, _ in PAIRS} - {"Engine"}


def test_no_generated_method_is_written_by_hand_as_well() -> None:
    for _, remote in PAIRS:
        for base in remote.__mro__[1:]:
            if base.__module__ == generated.__name__:
                assert not set(vars(base)) & set(vars(remote)) - {"__doc__", "__module__"}, base
