"""Attacks of low weight."""

import json
import os
import stat
import threading
from base64 import urlsafe_b64encode
from pathlib import Path
from uuid import uuid4

from tests.proof.attacks.holes import hole
from tests.proof.attacks.world import World, read_all


@hole("L1")
def agents_for_others(world: World) -> str:
    """An agent's token speaks for its own agent and workers."""
    world.ok(world.owner, "POST", "/workers/others/heartbeat", {"agents": ["resident"], "slots": 7})
    agent = world.agent(world.owner)
    token = world.ok(world.owner, "POST", f"/agents/{agent['id']}/token")["token"]
    body = {"status": "STOPPED", "slots": 1, "agents": ["resident"]}
    answer = world.call(token, "POST", "/workers/others/heartbeat", body)
    assert answer.status in (403, 404), answer
    workers = world.ok(world.owner, "GET", "/workers")["workers"]
    [worker] = [item for item in workers if item["id"] == "others"]
    assert (worker["status"], worker["slots"]) == ("RUNNING", 7), worker
    own = world.call(token, "POST", "/workers/own/heartbeat", {"agents": [agent["name"]]})
    assert own.status == 200, own
    return f"another's worker: {answer}, its own: {own}"


@hole("L2")
def forwarded_addresses(world: World) -> str:
    """`X-Forwarded-For` is believed from configured proxies alone."""
    name, _ = world.user("MEMBER")
    body = {"name": name, "password": "wrong " * 3}
    reports: list[int] = []
    while len(reports) < 20 and 429 not in reports:
        headers = {"X-Forwarded-For": f"198.51.100.{len(reports)}"}
        reports.append(world.call(None, "POST", "/login", body, headers=headers).status)
    assert reports[-1] == 429, reports
    return f"429 at try {len(reports)}, though each named an address of its own"


@hole("L3")
def hint_sockets(world: World) -> str:
    """A folder that somebody else prepared is not used."""
    if world.name != "sqlite":
        return "SQLite only"
    deep = world.cli.home / ("d" * 100)
    deep.mkdir(mode=0o700)
    url = {"TENUTO_DATABASE": f"sqlite:///{deep}/t.db", "TENUTO_DATA": str(deep)}
    world.cli("task", "list", **url)
    created = world.cli("task", "create", "--name", "x", **url)
    assert created.code == 0, created
    matches = [
        folder
        for base in (Path("/tmp"), Path(os.environ.get("TMPDIR", "/tmp")))
        for folder in base.glob(f"tenuto-{os.getuid()}-*")
        if folder.is_dir()
    ]
    for folder in matches:
        mode = folder.stat()
        if mode.st_uid == os.getuid():
            assert stat.S_IMODE(mode.st_mode) == 0o700, oct(mode.st_mode)
    return f"{len(matches)} folders, each ours and 0700"


@hole("L4")
def file_modes(world: World) -> str:
    """The files of the programs are private to their owner."""
    data = world.cli.data
    modes = {
        path.name: oct(stat.S_IMODE(path.stat().st_mode))
        for path in (data, *data.rglob("*"))
        if not path.is_socket()  # reached through their folder alone
    }
    wide = {name: mode for name, mode in modes.items() if int(mode, 8) & 0o077}
    assert not wide, wide
    return f"{len(modes)} files and folders, none for others"


@hole("L5")
def headers(world: World) -> str:
    """Answers say how a browser must treat them."""
    token = world.call(world.owner, "POST", "/tokens", {"name": world.fresh("key")})
    assert token.headers.get("x-content-type-options") == "nosniff", token.headers
    assert token.headers.get("cache-control") == "no-store", token.headers
    with world.connect() as connection:
        connection.sendall(b"GET /docs HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        text = read_all(connection, 10) or b""
    assert b"content-security-policy" in text.lower().split(b"\r\n\r\n")[0]
    return "nosniff, no-store, and a policy on /docs"


@hole("L6")
def odd_attempt_tokens(world: World) -> str:
    """An attempt's token with a wrong type in it is refused; needs no key to be tried."""
    task, _ = world.held(world.owner)
    head, body, sign = task["token"].split(".")
    odd = urlsafe_b64encode(json.dumps({"exp": "x"}).encode()).rstrip(b"=").decode()
    answers = {
        str(world.call(token, "POST", f"/agent-tasks/{task['id']}/complete", {}))
        for token in (f"{head}.{odd}.{sign}", f"{head}.{body}.{sign[:-2]}AA", "a.b.c")
    }
    assert all(answer.startswith("401") for answer in answers), answers
    return f"{', '.join(answers)} (with the key: tests/api)"


@hole("L7")
def one_claim_token_at_two(world: World) -> str:
    """A claim that is repeated at two API processes at once takes one task."""
    agent = world.agent(world.owner)
    for _ in range(8):
        world.ok(world.owner, "POST", "/agent-tasks", {"title": "x", "taskType": agent["name"]})
    body = {"agentId": agent["id"], "claimToken": uuid4().hex + uuid4().hex, "limit": 1}
    ids: set[str] = set()

    def claim(at: int) -> None:
        answer = world.call(world.owner, "POST", "/workers/w7/claim", body, at=at)
        assert answer.status == 200, answer
        ids.update(task["id"] for task in answer.body["tasks"])

    callers = [threading.Thread(target=claim, args=(n % len(world.urls),)) for n in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(ids) == 1, ids
    return "8 at once at two processes: one task"


@hole("L8")
def one_limit_for_bodies(world: World) -> str:
    """A body's limit is the setting alone."""
    body = {"title": "x", "input": "y" * 10_500_000}
    below = world.call(world.owner, "POST", "/agent-tasks", body)
    assert below.code != "body_too_large", below
    assert below.status in (201, 422), below
    above = world.call(world.owner, "POST", "/agent-tasks", body | {"input": "y" * 17_000_000})
    assert (above.status, above.code) == (413, "body_too_large"), above
    return f"10.5 MB: {below} (its field's own limit), 17 MB: {above}"


@hole("L9")
def doctor_on_superusers(world: World) -> str:
    """`doctor` warns of a login that can step round the policies."""
    if world.name != "postgres":
        return "PostgreSQL only"
    url = world.cli.environment["TENUTO_DATABASE"]
    own = json.loads(world.cli("--json", "doctor").out)
    above = world.cli("--json", "doctor", TENUTO_DATABASE=url.replace("tenuto_app@", "tenuto@"))
    warned = [
        check["name"]
        for check in json.loads(above.out)["checks"]
        if "superuser" in check["detail"] and check["status"] != "ok"
    ]
    assert warned, above.out
    assert not [
        check
        for check in own["checks"]
        if "superuser" in check["detail"].lower() and check["status"] != "ok"
    ]
    return f"warned under {', '.join(warned)}"


@hole("L10")
def invented_ids(world: World) -> str:
    """Parents and agents of tasks exist."""
    tenant = world.tenant()
    agent, _ = world.agent(tenant), None
    task = world.ok(tenant, "POST", "/agent-tasks", {"title": "hers"})
    answers = set()
    for field, others in (("parentId", task["id"]), ("targetAgentId", agent["id"])):
        for value in (others, str(uuid4())):
            answer = world.call(world.owner, "POST", "/agent-tasks", {"title": "x", field: value})
            assert answer.status == 404, (field, answer)
            answers.add(str(answer))
    return f"foreign and invented alike: {', '.join(answers)}"


@hole("L11")
def dependencies(world: World) -> str:
    """The image's dependencies are pinned by hash, and PyJWT has no known fault."""
    del world
    root = Path(__file__).resolve().parents[3]
    lock = (root / "deploy" / "requirements.lock").read_text()
    assert "--hash=sha256:" in lock
    assert (
        "pyjwt[crypto]>=2.13" in (root / "pyproject.toml").read_text()
        or "pyjwt>=2.13" in (root / "pyproject.toml").read_text()
    )
    return f"{lock.count('==')} packages with hashes, PyJWT >= 2.13"


@hole("L12")
def quota_above_the_ceiling(world: World) -> str:
    """An owner's quota ends at the operator's ceiling."""
    tenant = world.tenant()
    position = world.ok(tenant, "GET", "/me")["workspaceId"]
    above = world.call(tenant, "PUT", f"/workspaces/{position}/quota", {"pending": 2_000_000})
    assert above.status == 422, above
    world.ok(tenant, "PUT", f"/workspaces/{position}/quota", {})
    return f"above the ceiling: {above}"
