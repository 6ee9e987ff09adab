"""Attacks of medium weight."""

import json
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from tests.proof.attacks.holes import hole, status_line
from tests.proof.attacks.world import PASSWORD, World, lines_like, log_text, read_all
from tests.waiting import eventually_sync

HELD_UP_S = 1.0
"""How long others wait only if they are held up, on a busy machine, too."""


@hole("M1")
def the_last_owner(world: World) -> str:
    """A token of a higher role cannot be revoked, and the last owner stays."""
    tenant = world.tenant()
    [owned] = [item for item in world.ok(tenant, "GET", "/tokens") if item["role"] == "OWNER"]
    admin = world.key("ADMIN", tenant, scopes=["read", "write", "work", "admin"])["token"]
    above = world.call(admin, "DELETE", f"/tokens/{owned['id']}")
    assert above.status == 403, above
    last = world.call(tenant, "DELETE", f"/tokens/{owned['id']}")
    assert last.status == 409, last
    world.ok(tenant, "GET", "/me")
    return f"by an ADMIN: {above}, the last one: {last}"


@hole("M2")
def unfinished_requests(world: World) -> str:
    """A request that is never finished is ended."""
    half = [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"]
    open_ = [world.connect() for _ in half]
    slow = world.connect()
    slow.sendall(
        b"POST /api/v1/agent-tasks HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer " + world.owner.encode() + b"\r\ncontent-length: 100\r\n\r\n{"
    )
    for connection, text in zip(open_, half, strict=True):
        connection.sendall(text)
    began = time.monotonic()
    reports = [status_line(read_all(connection, 20)) or "closed" for connection in open_]
    heads = time.monotonic() - began
    body = status_line(read_all(slow, 75)) or "closed"
    took = time.monotonic() - began
    for connection in (*open_, slow):
        connection.close()
    return f"heads: {', '.join(reports)} in {heads:.0f} s; body: {body} after {took:.0f} s"


@hole("M3")
def bodies_of_unknown_clients(world: World) -> str:
    """A stranger's body is not read, let alone parsed."""
    body = json.dumps({f"name{n}": n for n in range(700_000)}).encode()
    assert 14_000_000 < len(body) < 16_000_000
    latencies: list[float] = []
    stop = threading.Event()

    def others() -> None:
        while not stop.is_set():
            began = time.monotonic()
            world.ok(world.owner, "GET", "/me")
            latencies.append(time.monotonic() - began)

    looking = threading.Thread(target=others)
    looking.start()
    answers = set()
    for _ in range(8):
        with world.connect() as connection:
            head = (
                "POST /api/v1/agent-tasks HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            with suppress(ConnectionError):
                connection.sendall(head.encode() + body)
            answers.add(status_line(read_all(connection, 20)) or "reset")
    stop.set()
    looking.join()
    assert answers <= {"401 Unauthorized", "reset"}, answers
    latencies.sort()
    p99 = latencies[int(len(latencies) * 0.99)]
    assert p99 < HELD_UP_S, p99
    return f"{', '.join(answers)}; p99 of others {p99 * 1000:.0f} ms of {len(latencies)}"


@hole("M4")
def many_streams(world: World) -> str:
    """One token holds some streams and no more."""
    viewer = world.key("VIEWER")["token"]
    request = (
        f"GET /api/v1/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {viewer}\r\n\r\n"
    ).encode()
    held, answers = [], []
    try:
        for n in range(120):
            connection = world.connect(f"127.0.0.{2 + n % 40}")
            held.append(connection)
            connection.sendall(request)
            answers.append(connection.recv(4096).split(b"\r\n")[0].decode())
    finally:
        for connection in held:
            connection.close()
    taken = sum("200" in answer for answer in answers)
    assert 10 <= taken < 120, taken
    assert all("200" in answer or "429" in answer for answer in answers), set(answers)
    again = eventually_sync(lambda: _stream(world, request), timeout=30)
    return f"{taken} of 120 taken, the others 429; when they are gone: {again}"


def _stream(world: World, request: bytes) -> str:
    with world.connect() as connection:
        connection.sendall(request)
        first = connection.recv(4096).split(b"\r\n")[0].decode()
    return "200" if "200" in first else ""


@hole("M5")
def endless_transcript(world: World) -> str:
    """An attempt's transcript has an end over the API, too."""
    task, _ = world.held(world.owner)
    path = f"/agent-tasks/{task['id']}/transcript"
    fence = {"attempt": task["attempt"], "leaseToken": task["leaseToken"]}
    number, answers = 0, set()
    for _ in range(10):
        lines = [{"number": number + n, "text": "x" * 1_000_000} for n in range(9)]
        number += 9
        answers.add(str(world.call(world.owner, "POST", path, {"lines": lines} | fence)))
    for _ in range(5):
        lines = [{"number": number + n, "text": "y" * 1_000} for n in range(900)]
        number += 900
        answers.add(str(world.call(world.owner, "POST", path, {"lines": lines} | fence)))
    stored, page, after = 0, 1, ""
    while page:
        result = world.ok(
            world.owner, "GET", f"/agent-tasks/{task['id']}/transcript?limit=1000{after}"
        )
        stored += sum(len(line["text"]) for line in result["lines"])
        cursor = result.get("nextOffset") or result.get("nextCursor")
        page, after = bool(cursor and result["lines"]), f"&offset={cursor}"
    assert stored < 2_000_000, stored
    return f"{', '.join(sorted(answers))}; kept {stored // 1024} KB of 94,000"


@hole("M6")
def quota_of_children(world: World) -> str:
    """Waiting tasks count against the quota wherever they come from."""
    tenant = world.tenant()
    position = world.ok(tenant, "GET", "/me")["workspaceId"]
    task, _ = world.held(tenant)
    world.ok(tenant, "PUT", f"/workspaces/{position}/quota", {"pending": 5})
    fence = {"attempt": task["attempt"], "leaseToken": task["leaseToken"]}
    reports = []
    for n in range(30):
        body = fence | {"key": f"k{n}", "task": {"title": "t", "taskType": "nobody"}}
        reports.append(
            world.call(tenant, "POST", f"/agent-tasks/{task['id']}/children", body).status
        )
    created = sum(status < 300 for status in reports)
    assert created <= 5, reports
    assert set(reports[created:]) == {429}, reports
    world.ok(tenant, "PUT", "/definitions/born", {"spec": {"prompt": "p", "taskType": "nobody"}})
    rule = {"name": "each", "target": "born", "event": "x"}
    world.ok(tenant, "POST", "/triggers", rule)
    for _ in range(20):
        world.call(tenant, "POST", "/events", {"name": "x"})
    refused = eventually_sync(
        lambda: world.ok(tenant, "GET", "/triggers")["triggers"][0].get("lastError"), timeout=30
    )
    assert "waiting to run" in refused, refused
    waiting = world.ok(tenant, "GET", "/agent-tasks?status=PENDING&limit=100")["tasks"]
    assert len(waiting) <= 5, len(waiting)
    return f"{created} of 30 children, then 429; {len(waiting)} wait after 20 events"


@hole("M7")
def forged_log_lines(world: World) -> str:
    """No text of a task begins a line of the log."""
    task, agent = world.held(world.owner)
    fence = {"attempt": task["attempt"], "leaseToken": task["leaseToken"]}
    hostile = "x\nINFO     forged: line\r\nWARNING  forged: line\x1b[31m"
    body = fence | {"error": hostile, "retryable": False}
    world.ok(world.owner, "POST", f"/agent-tasks/{task['id']}/fail", body)
    with world.worker("--agent", "m7", "--task-tag", "m7", "--command", "false"):
        created = {"title": "t\nINFO     forged: line", "taskTags": ["m7"], "maxAttempts": 1}
        again = world.ok(world.owner, "POST", "/agent-tasks", created)
        world.ended(world.owner, again["id"])
    del agent
    log = log_text(world.cli)
    forged = lines_like(log, r"\S*\s*(INFO|WARNING)\s+forged")
    assert not forged, forged
    assert "\x1b" not in log
    return "the log shows it escaped, in one line"


@hole("M8")
def lock_out(world: World) -> str:
    """Wrong passwords of one address do not stop the right one from another."""
    name, _ = world.user("MEMBER")
    wrong = [
        world.call(None, "POST", "/login", {"name": name, "password": "wrong " * 3}).status
        for _ in range(12)
    ]
    assert set(wrong) <= {401, 429}, wrong
    body = json.dumps({"name": name, "password": PASSWORD}).encode()
    with world.connect("127.0.0.9") as connection:
        connection.sendall(
            b"POST /api/v1/login HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        right = status_line(read_all(connection, 20))
    assert right.startswith("200"), right
    other, _ = world.user("MEMBER")
    beside = world.call(None, "POST", "/login", {"name": other, "password": PASSWORD})
    assert beside.status == 200, beside
    first = f"12 wrong: {wrong.count(401)} x 401, {wrong.count(429)} x 429"
    return f"{first}; from elsewhere {right}; another user here {beside}"


@hole("M9")
def names_across_tenants(world: World) -> str:
    """User names of another workspace are not revealed."""
    name, _ = world.user("MEMBER")
    tenant = world.tenant()
    body = {"name": name, "password": PASSWORD}
    user = world.call(tenant, "POST", "/users", body)
    assert user.status == 201, user
    position = world.call(tenant, "POST", "/workspaces", {"name": "default"})
    assert position.status == 201, position
    world.ok(None, "POST", "/login", body)
    return f"user of that name: {user}, workspace of that name: {position}"


@hole("M10")
def tokens_that_outlive_their_maker(world: World) -> str:
    """A token ends with the one it was made with."""
    soon = (datetime.now(UTC) + timedelta(seconds=4)).isoformat()
    every = ["read", "write", "work", "admin"]
    brief = world.key("ADMIN", expiresAt=soon, scopes=every)["token"]
    created = world.key("ADMIN", brief)
    assert created["expiresAt"] is not None, created
    far = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    later = world.call(brief, "POST", "/tokens", {"name": "later", "expiresAt": far})
    assert later.status in (403, 422), later
    maker = world.key("ADMIN", scopes=every)
    below = world.key("MEMBER", maker["token"])["token"]
    world.ok(below, "GET", "/me")
    world.ok(world.owner, "DELETE", f"/tokens/{maker['id']}")
    revoked = world.call(below, "GET", "/me")
    assert revoked.status == 401, revoked
    ended = eventually_sync(
        lambda: a if (a := world.call(created["token"], "GET", "/me")).status == 401 else None,
        timeout=20,
    )
    return f"later end: {later}, maker revoked: {revoked}, maker's end: {ended}"
