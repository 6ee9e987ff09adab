"""A canary secret that passes through every part is found only in its attempt."""

import asyncio
import logging
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import httpx2
import pytest
from tests.api.conftest import V1, Api
from tests.api.edge.test_streams import stream

from tenuto.settings import Settings, sqlite_path

CANARY = "canary-7f3a91c2d4"
NAMED = "canary-named-55aa"


async def test_secret_appears_in_no_output(
    api: Api,
    owner: httpx2.AsyncClient,
    settings: Settings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    received: list[str] = []

    async def ask(client: httpx2.AsyncClient, method: str, path: str, **more: Any) -> Any:
        answer = await client.request(method, f"{V1}{path}", **more)
        received.append(answer.text)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    await ask(owner, "PUT", "/secrets/deploy", json={"value": NAMED})
    values = {"user": "ada", "secrets": {"key": CANARY}, "named": {"$secret": "deploy"}}
    created = await ask(owner, "POST", "/agent-tasks", json={"title": "t", "input": values})
    assert created["inputContext"]["secrets"] == {"key": "***"}
    agent = str(uuid4())
    await ask(owner, "PUT", f"/agents/{agent}", json={"name": "a"})
    answer = await owner.post(f"{V1}/agents/{agent}/claim", json={})
    [work] = answer.json()["tasks"]
    assert work["inputContext"] == {"user": "ada", "secrets": {"key": CANARY}, "named": NAMED}
    session = await api.client(work["token"])
    task = created["id"]
    output = f"the key is {CANARY} and {NAMED}"
    async with stream(owner, f"/agent-tasks/{task}/events") as events:
        lines = {"lines": [{"number": 0, "text": output, "level": "ERROR"}]}
        await ask(session, "POST", f"/agent-tasks/{task}/transcript", json=lines)
        reported = {"currentStep": output, "progressPercent": 5, "checkpointData": {"k": output}}
        await ask(session, "PATCH", f"/agent-tasks/{task}/progress", json=reported)
        sample = {"currentTaskId": task, "currentStep": output, "status": NAMED}
        await ask(session, "POST", f"/agents/{agent}/heartbeat", json=sample)
        health = await ask(owner, "GET", f"/agents/{agent}/health")
        assert health["current"]["currentStep"] == "the key is *** and ***"
        failed = {"error": output, "stack": output, "retryable": False}
        await ask(session, "POST", f"/agent-tasks/{task}/fail", json=failed)
        received.append(str(await events.until("end")))
    for path in ("", "/logs", "/attempts", "/transcript", "/explain"):
        await ask(owner, "GET", f"/agent-tasks/{task}{path}")
    for path in ("/agent-tasks", "/secrets", "/coordinator/logs", "/dead-letters"):
        await ask(owner, "GET", path)
    received.append((await owner.get("/metrics")).text)
    received.append(caplog.text)
    received += await asyncio.to_thread(stored, settings.database_url())
    if sqlite_path(settings.database_url()) is None:
        received += await dumped(settings.database_url())
    assert any("the key is ***" in item for item in received)
    for secret in (CANARY, NAMED):
        assert [item[:200] for item in received if secret in item] == []


def stored(url: str) -> list[str]:
    """The bytes of a SQLite database and what is beside it."""
    path = sqlite_path(url)
    if path is None:
        return []
    files = Path(path).parent.glob("*")
    return [file.read_bytes().decode("latin-1") for file in files if file.is_file()]


async def dumped(url: str) -> list[str]:
    """Every row of a PostgreSQL database as text."""
    connection = await asyncpg.connect(url)
    try:
        tables = await connection.fetch(
            "select relname from pg_class where relkind = 'r'"
            " and relnamespace = 'public'::regnamespace"
        )
        rows = [await connection.fetch(f"select t::text from {name} t") for (name,) in tables]
        return [row[0] for item in rows for row in item]
    finally:
        await connection.close()
