"""An installation under attack: two API processes, a worker, a coordinator and two tenants."""

import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import httpx2
from tests.cli.orchestrate import Orchestrate, serving, started, token_of
from tests.services.postgres import USER, PostgresServer
from tests.waiting import eventually_sync

V1 = "/api/v1"
LOGIN = "tenuto_app"
PASSWORD = "a long password"
SETTINGS = {
    "TENUTO_HEARTBEAT_S": "1",
    "TENUTO_POLL_S": "0.2",
    "TENUTO_TICK_S": "0.5",
    "TENUTO_QUOTA_PENDING": "1000000",
}


class Answer(NamedTuple):
    """What the API said."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        return str(self.body.get("code", "")) if isinstance(self.body, dict) else ""

    def __str__(self) -> str:
        return f"{self.status} {self.code}".strip()


class World:
    """The programs, and means to speak to them as anybody."""

    def __init__(self, name: str, cli: Orchestrate, urls: Sequence[str]) -> None:
        self.name = name
        self.cli = cli
        self.urls = urls
        self.owner = token_of(cli)
        self._clients = [httpx2.Client(base_url=url, timeout=60) for url in urls]
        self._names = 0

    def close(self) -> None:
        for client in self._clients:
            client.close()

    @property
    def address(self) -> tuple[str, int]:
        """Returns the address of the first API process."""
        parts = urlsplit(self.urls[0])
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def call(
        self,
        token: str | None,
        method: str,
        path: str,
        body: Any = None,
        *,
        at: int = 0,
        **more: Any,
    ) -> Answer:
        """The answer to a request that bears the token, from the chosen API process."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= more.pop("headers", {})
        answer = self._clients[at].request(
            method, V1 + path, headers=headers, **({} if body is None else {"json": body}), **more
        )
        text = answer.text
        output = json.loads(text) if "json" in answer.headers.get("content-type", "") else text
        return Answer(answer.status_code, output, dict(answer.headers))

    def ok(self, token: str | None, method: str, path: str, body: Any = None) -> Any:
        """The body of an answer that must be a success."""
        answer = self.call(token, method, path, body)
        assert answer.status < 300, (method, path, answer)
        return answer.body

    def fresh(self, kind: str) -> str:
        """A name that nobody has."""
        self._names += 1
        return f"{kind}-{self._names}"

    def key(self, role: str, by: str | None = None, **more: Any) -> Any:
        """A new API token of that role, made with the token `by`, the owner's by default."""
        body = {"name": self.fresh("key"), "role": role, **more}
        return self.ok(by or self.owner, "POST", "/tokens", body)

    def user(self, role: str, by: str | None = None) -> tuple[str, str]:
        """Name and id of a new user."""
        name = self.fresh("user")
        body = {"name": name, "password": PASSWORD, "role": role}
        return name, self.ok(by or self.owner, "POST", "/users", body)["id"]

    def login(self, name: str) -> str:
        """The token of a login of that user."""
        return str(self.ok(None, "POST", "/login", {"name": name, "password": PASSWORD})["token"])

    def tenant(self) -> str:
        """The owner's token of a new workspace."""
        created = self.ok(self.owner, "POST", "/workspaces", {"name": self.fresh("workspace")})
        return str(
            created["token"]["token"] if isinstance(created["token"], dict) else created["token"]
        )

    def agent(self, by: str, **more: Any) -> dict[str, str]:
        """Id and name of a new agent that takes a type of tasks of its own."""
        name, created = self.fresh("agent"), str(uuid4())
        self.ok(by, "PUT", f"/agents/{created}", {"name": name, "taskTypes": [name], **more})
        return {"id": created, "name": name}

    def held(self, by: str) -> tuple[dict[str, Any], dict[str, str]]:
        """A task that an agent of that workspace has claimed, and the agent."""
        agent = self.agent(by)
        self.ok(by, "POST", "/agent-tasks", {"title": "held", "taskType": agent["name"]})
        [task] = self.ok(by, "POST", f"/agents/{agent['id']}/claim", {"limit": 1})["tasks"]
        return task, agent

    def task(self, by: str, task: str) -> dict[str, Any]:
        result: dict[str, Any] = self.ok(by, "GET", f"/agent-tasks/{task}")
        return result

    def ended(self, by: str, task: str) -> dict[str, Any]:
        """The task when it is over."""
        return eventually_sync(
            lambda: result if (result := self.task(by, task)).get("finishedAt") else None,
            timeout=60,
        )

    @contextmanager
    def worker(self, *words: str) -> Iterator[Path]:
        """A worker with these options until the block ends; answers where it logs."""
        with started(self.cli, "worker", *words) as log:
            eventually_sync(lambda: "hosts" in log.read_text(), timeout=60)
            yield log

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """A raw connection to the API from that address."""
        created = socket.create_connection(self.address, timeout=30, source_address=(source, 0))
        created.settimeout(30)
        return created


def read_all(connection: socket.socket, seconds: float) -> bytes | None:
    """Reads until the other side closes; returns `None` if it has not by then."""
    until = time.monotonic() + seconds
    parts: list[bytes] = []
    while (left := until - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            part = connection.recv(65536)
        except TimeoutError:
            return None
        except ConnectionError:
            return b"".join(parts)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


@contextmanager
def world(name: str, count: int = 2) -> Iterator[World]:
    """Everything running on `sqlite` or on `postgres`, with a login that is no superuser there."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenuto-attacks-")))
        cli = Orchestrate(home)
        cli.environment |= SETTINGS
        if name == "postgres":
            server = stack.enter_context(PostgresServer(fast=True))
            owner = server.create_database()
            cli.environment["TENUTO_DATABASE"] = owner
            cli.ok("db", "migrate")
            _make_login(server, owner)
            cli.environment["TENUTO_DATABASE"] = owner.replace(f"//{USER}@", f"//{LOGIN}@")
        urls = [stack.enter_context(serving(_beside(cli, f"api-{n}"))) for n in range(count)]
        stack.enter_context(started(cli, "coordinator"))
        created = World(name, cli, urls)
        stack.callback(created.close)
        yield created


def _beside(cli: Orchestrate, name: str) -> Orchestrate:
    """The same installation, with a folder of its own to run in and to log to."""
    created = copy(cli)
    created.home = cli.home / name
    created.home.mkdir()
    return created


def _make_login(server: PostgresServer, url: str) -> None:
    statement = f"create role {LOGIN} login in role tenuto_runtime, tenuto_system"
    psql = str(server.program("psql"))
    subprocess.run([psql, "-X", "-q", "-d", url, "-c", statement], check=True, capture_output=True)


def log_text(cli: Orchestrate) -> str:
    """All that the programs have logged."""
    return "".join(path.read_text(errors="replace") for path in sorted(cli.home.rglob("*.log")))


def lines_like(text: str, pattern: str) -> list[str]:
    return [line for line in text.split("\n") if re.match(pattern, line)]
