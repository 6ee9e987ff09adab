"""Attacks of the highest weight."""

import json
from contextlib import suppress
from typing import Any
from uuid import uuid4

from tests.proof.attacks.holes import hole, status_line
from tests.proof.attacks.world import World, read_all


@hole("H1")
def task_environment(world: World) -> str:
    """A task's `env` and `cwd` decide nothing about the worker's own command."""
    kind = world.fresh("fixed")
    mark = world.cli.home / "owned"
    values: list[dict[str, Any]] = [
        {"env": {"BASH_ENV": f"$(id > {mark})"}},
        {"env": {"LD_PRELOAD": "/nowhere.so"}},
        {"env": {"PATH": "/nowhere"}},
        {"env": {"PLAIN": "value"}},
        {"cwd": "/etc"},
    ]
    member = world.key("MEMBER")["token"]
    own = "bash -c 'pwd; echo fixed'"
    words = ("--agent", kind, "--no-accept-commands", "--command", own, "--task-tag", kind)
    lines = []
    with world.worker(*words):
        for item in values:
            body = {"title": "x", "prompt": "p", "taskTags": [kind], **item}
            answer = world.call(member, "POST", "/agent-tasks", body)
            if answer.status == 422:
                lines.append(answer.code)
                continue
            ended = world.ended(member, answer.body["id"])
            assert ended["status"] == "FAILED", (item, ended)
            lines.append(ended["status"])
    assert not mark.exists()
    return ", ".join(lines)


@hole("H2")
def keys_of_a_lowered_user(world: World) -> str:
    """A user's keys are worth what the user is now."""
    name, user = world.user("ADMIN")
    login = world.login(name)
    key = world.key("ADMIN", login, scopes=["read", "write", "work", "admin"])["token"]
    world.ok(key, "PUT", "/secrets/h2", {"value": "v" * 10})
    world.ok(world.owner, "PATCH", f"/users/{user}", {"role": "VIEWER"})
    lowered = world.call(key, "PUT", "/secrets/h2", {"value": "w" * 10})
    assert lowered.status == 403, lowered
    world.ok(key, "GET", "/agent-tasks")
    world.ok(world.owner, "DELETE", f"/users/{user}")
    gone = world.call(key, "GET", "/agent-tasks")
    assert gone.status == 401, gone
    return f"lowered: {lowered}, removed: {gone}"


@hole("H3")
def endless_header(world: World) -> str:
    """Headers have an end."""
    with world.connect() as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-big: ")
        sent = 0
        with suppress(ConnectionError):
            while sent < 100_000_000:
                sent += connection.send(b"a" * 65536)
        answer = status_line(read_all(connection, 5))
    assert sent < 40_000_000, sent  # what is thrown away so that the client can read the answer
    many = b"GET /health/live HTTP/1.1\r\nhost: x\r\n" + b"x-a: b\r\n" * 20_000 + b"\r\n"
    with world.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(many)
        status = status_line(read_all(connection, 5))
    assert "200" not in status, status
    return (
        f"closed after {sent // 1024} KB ({answer or 'reset'}), 20,000 headers: {status or 'reset'}"
    )


@hole("H4")
def lease_of_another_agent(world: World) -> str:
    """A lease is worth nothing in another workspace."""
    task, _ = world.held(world.owner)
    untrusted = world.key("MEMBER", world.tenant())["token"]
    fence = {"attempt": task["attempt"], "leaseToken": task["leaseToken"]}
    unknown = uuid4()
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "progress": ("PATCH", {"progressPercent": 50}),
        "transcript": ("POST", {"lines": [{"number": 0, "text": "t"}]}),
        "checkpoint": ("POST", {"data": 1}),
        "steps": ("POST", {"key": "k", "value": 1}),
        "children": ("POST", {"key": "k", "task": {"title": "t"}}),
        "park": ("POST", {"resumeAt": "2100-01-01T00:00:00Z"}),
        "release": ("POST", {}),
        "fail": ("POST", {"error": "e"}),
        "not-started": ("POST", {"error": "e"}),
        "complete": ("POST", {}),
    }
    before = world.task(world.owner, task["id"])
    answers = set()
    for name, (method, body) in bodies.items():
        reports = [
            world.call(untrusted, method, f"/agent-tasks/{item}/{name}", fence | body)
            for item in (task["id"], unknown)
        ]
        assert reports[0][:1] == reports[1][:1], (name, reports)
        assert reports[0].code == reports[1].code, (name, reports)
        answers.add(str(reports[0]))
    lease = {"taskId": task["id"], **fence}
    heartbeat = world.call(untrusted, "POST", "/workers/w/heartbeat", {"leases": [lease]})
    assert heartbeat.body["lost"] == [task["id"]], heartbeat.body
    after = world.task(world.owner, task["id"])
    assert (after["status"], after["version"]) == (before["status"], before["version"])
    world.ok(world.owner, "POST", f"/agent-tasks/{task['id']}/complete", fence)
    return f"as an unknown id: {', '.join(sorted(answers))}; heartbeat: lost"


@hole("H5")
def secrets_by_use(world: World) -> str:
    """The users of a secret can be restricted, and a member cannot bypass it."""
    world.ok(
        world.owner, "PUT", "/secrets/payroll", {"value": "hers-alone", "use": {"role": "ADMIN"}}
    )
    world.ok(
        world.owner, "PUT", "/secrets/robots", {"value": "hers-alone", "use": {"agents": ["robot"]}}
    )
    member = world.key("MEMBER")["token"]
    agent = world.agent(member)
    body = {"title": "x", "taskType": agent["name"]}
    early = world.call(
        member, "POST", "/agent-tasks", body | {"input": {"x": {"$secret": "payroll"}}}
    )
    assert early.status == 403, early
    for name in ("payroll", "robots"):
        created = body | {"input": {"x": {"$secret": name}}}
        world.ok(world.owner, "POST", "/agent-tasks", created)
    for _ in range(2):
        claimed = world.call(member, "POST", f"/agents/{agent['id']}/claim", {"limit": 5})
        assert "hers-alone" not in json.dumps(claimed.body), claimed
    return f"reference by a MEMBER: {early}; claims by a MEMBER: no value"
