"""Every query of a workspace table names the workspace, except queries of the system."""

import msgspec
import pytest
from tests.store.tenancy import tenant_tables, unbound

from tenuto.store import sql
from tenuto.store.dialects import SQLITE

COORDINATOR = "duties of the coordinator for all workspaces, which hold what they found"
PRUNING = "removes or puts away what is past its age, of all workspaces"
RELAY = "subscribers read the events of all workspaces, and pass each on to its own"
METRICS = "counts over all workspaces, without names or ids"
IDENTITY = "finds out who asks, and so which workspace"
WEBHOOKS = "sends the deliveries of all workspaces, by what it holds"
PUSH = "the dispatcher looks after the sessions of all workspaces"
ROTATION = "seals values of all workspaces with another key, by what it holds"
PROOF = "looks at a whole database from outside, for what must never be"

SYSTEM = {
    "agents_due": COORDINATOR,
    "event_causes": COORDINATOR,
    "coordinator_events": COORDINATOR,
    "groups_miscounted": COORDINATOR,
    "leases_expired_by_workspace": COORDINATOR,
    "leases_of_worker": COORDINATOR,
    "schedule_lock_active": COORDINATOR,
    "schedules_due": COORDINATOR,
    "schedules_unblocked": COORDINATOR,
    "timer_set": COORDINATOR,
    "permits_miscounted": COORDINATOR,
    "dependency_pairs_waiting": COORDINATOR,
    "workers_stale": COORDINATOR,
    "agent_health_prune": PRUNING,
    "archivable": PRUNING,
    "deliveries_prune": PRUNING,
    "idempotency_prune": PRUNING,
    "lane_prune": PRUNING,
    "messages_prune": PRUNING,
    "prune_events": PRUNING,
    "prune_other_events": PRUNING,
    "prune_payload": PRUNING,
    "workers_prune": PRUNING,
    "events_after": RELAY,
    "events_with_future_xid": RELAY,
    "events_end": RELAY,
    "fan_out_ahead": RELAY,
    "fan_out_skip": RELAY,
    "renumber_events": RELAY,
    "triggers_ahead": RELAY,
    "triggers_skip": RELAY,
    "followed_tasks": RELAY,
    "event_history": METRICS,
    "metrics_sample": METRICS,
    "session_by_hash": IDENTITY,
    "token_by_hash": IDENTITY,
    "tokens_exist": IDENTITY,
    "user_by_name": IDENTITY,
    "user_delete": "a user belongs to several workspaces",
    "user_in_workspace": IDENTITY,
    "workspaces": IDENTITY,
    "deliveries_due": WEBHOOKS,
    "deliveries_start": WEBHOOKS,
    "delivery_succeeded": WEBHOOKS,
    "delivery_failed": WEBHOOKS,
    "webhook_health_locked": WEBHOOKS,
    "webhooks_probe": WEBHOOKS,
    "webhooks_ready": WEBHOOKS,
    "webhooks_locked": WEBHOOKS,
    "push_agents": PUSH,
    "push_sessions_to_kill": PUSH,
    "push_sessions_stopping": PUSH,
    "secrets_reencrypt": ROTATION,
    "secrets_with_old_key": ROTATION,
    "task_secrets_reencrypt": ROTATION,
    "task_secrets_with_old_key": ROTATION,
    "webhook_secrets_reencrypt": ROTATION,
    "webhook_secrets_with_old_key": ROTATION,
    "audit_mismatches": PROOF,
    "chain_breaks": PROOF,
    "audit_transitions": PROOF,
    "audit_unfinished": PROOF,
    "audit_lost_leases": PROOF,
    "audit_tasks": PROOF,
    "inconsistent_tasks": PROOF,
}


def test_every_query_names_the_workspace_unless_it_belongs_to_the_system() -> None:
    tables = tenant_tables()
    matches = {name for name, query in sql.load(SQLITE).items() if unbound(query, tables)}
    assert matches - SYSTEM.keys() == set()
    assert SYSTEM.keys() - matches == set()  # what names it, or is not there, needs no reason


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("complete_if_owned", " and task.workspace = :workspace"),
        ("progress", " and task.workspace = :workspace"),
        ("heartbeat", " and task.workspace = :workspace"),
        ("usage_add", " and task.workspace = :workspace"),
        ("tasks_locked", "[workspace: and +task.workspace = :workspace]"),
        ("checkpoint_save", "\n  where checkpoint.workspace = excluded.workspace"),
        ("children_open", " [workspace: and +task_group.workspace = :workspace]"),
        ("activations", "[workspace: and +body.workspace = :workspace]"),
        ("edit", "workspace = :workspace and "),
        ("agents_set_status", " and agent.workspace = moved.workspace"),
        ("agent_heartbeat", "agent.workspace = :workspace and "),
    ],
)
def test_query_without_a_workspace_condition_is_detected(name: str, condition: str) -> None:
    query = sql.load(SQLITE)[name]
    assert any(condition in step.text for step in query.steps)
    steps = tuple(
        msgspec.structs.replace(step, text=step.text.replace(condition, "")) for step in query.steps
    )
    assert unbound(msgspec.structs.replace(query, steps=steps), tenant_tables())


@pytest.mark.parametrize(
    "text",
    [
        "select task.id from task where task.id = :id",
        "select task.id from task where task.workspace = :workspace or task.id = :id",
        """delete from task where task.id = :id
        returning id, (select count(*) from agent where agent.workspace = :workspace)""",
    ],
)
def test_query_with_an_ineffective_workspace_condition_is_detected(text: str) -> None:
    query = sql.load(SQLITE)["task_show"]
    [step, *_] = query.steps
    created = msgspec.structs.replace(query, steps=(msgspec.structs.replace(step, text=text),))
    assert unbound(created, tenant_tables())
