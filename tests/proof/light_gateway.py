"""A gateway whose sessions are coroutines of its own process, so that hundreds fit on a laptop.

    python -m tests.proof.light_gateway PORT BEAT_S RUN_S

A session beats every BEAT_S seconds and completes its task after RUN_S. They die with the process.
"""

import asyncio
import sys
from contextlib import suppress
from typing import Any

import httpx2
import msgspec
import uvicorn


class Sessions:
    """What was spawned, by key and by wish."""

    def __init__(self, heartbeat_s: float, run_s: float) -> None:
        self._beat_s = heartbeat_s
        self._run_s = run_s
        self._wishes: dict[str, str] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        limits = httpx2.Limits(max_connections=50, max_keepalive_connections=50)
        self._client = httpx2.AsyncClient(timeout=60, limits=limits)

    def spawn(self, body: dict[str, Any]) -> str:
        concurrency = body["idempotencyKey"]
        if concurrency not in self._wishes:
            key = self._wishes[concurrency] = f"light-{len(self._wishes)}"
            self._running[key] = asyncio.create_task(self._session(body))
        return self._wishes[concurrency]

    def kill(self, key: str) -> bool:
        task = self._running.pop(key, None)
        return task is not None and task.cancel()

    async def _session(self, body: dict[str, Any]) -> None:
        base, token = body["callback"]["url"], body["callback"]["token"]
        headers = {"authorization": f"Bearer {token}"}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._run_s):
                await self._live(f"{base}/agents/{body['agentId']}/heartbeat", headers)
                return
        url = f"{base}/agent-tasks/{body['taskId']}/complete"
        await self._client.post(url, headers=headers, json={"outputResult": body["taskId"]})

    async def _live(self, url: str, headers: dict[str, str]) -> None:
        """Beat until the lease is lost, or time is up."""
        while True:
            await asyncio.sleep(self._beat_s)
            with suppress(httpx2.HTTPError):
                if (await self._client.post(url, headers=headers, json={})).status_code == 409:
                    return


def app(sessions: Sessions) -> Any:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        if scope["path"].endswith("/spawn"):
            key = sessions.spawn(msgspec.json.decode(body))
            status, output = 200, msgspec.json.encode({"session": {"sessionKey": key}})
        else:
            existing = sessions.kill(scope["path"].split("/")[-2])
            status, output = (200 if existing else 404), b"{}"
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": output})

    return serve


async def main(port: int, heartbeat_s: float, run_s: float) -> None:
    served = app(Sessions(heartbeat_s, run_s))
    config = uvicorn.Config(
        served, host="127.0.0.1", port=port, log_level="warning", lifespan="off"
    )
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
