"""A gateway to try push dispatch with: spawns a process per session. Standard library only.

    python examples/gateway/gateway.py --port 9000
    python examples/gateway/gateway.py --port 9000 -- my-agent --flag

Sessions get the task as JSON on standard input and the way back in their environment. They end with
the gateway, however it ends: each runs under a small keeper that kills its process group when the
pipe from the gateway closes.
"""

import argparse
import hmac
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GRACE_S = 3.0
MAX_BODY = 16 * 1024 * 1024
REMEMBERED = 10_000
KILL = re.compile(r"/api/agents/sessions/([^/]+)/kill")
AGENT = Path(__file__).with_name("agent.py")


def keep(pipe: int, command: list[str]) -> int:
    """Run a command in a process group of its own until it ends, or the pipe's other end does."""
    child = subprocess.Popen(command, start_new_session=True)

    def watch() -> None:
        os.read(pipe, 1)
        end_group(child.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    end_group(child.pid, signal.SIGKILL)
    return code


def end_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def checked(body: Any) -> dict[str, Any]:
    """The body of a spawn, or `ValueError` saying what is wrong with it."""
    if not isinstance(body, dict) or not isinstance(body.get("callback"), dict):
        raise ValueError("the body is not a spawn with a callback")  # noqa: TRY004  an answer
    said = {**body, **{f"callback.{name}": value for name, value in body["callback"].items()}}
    for name in ("agentId", "taskId", "callback.url", "callback.token"):
        if not isinstance(said.get(name), str) or "\0" in said[name]:
            raise ValueError(f"{name} is missing, or no text")
    return body


class Session:
    """One running command and the keeper above it."""

    def __init__(self, body: dict[str, Any], command: list[str]) -> None:
        self.key = uuid.uuid4().hex
        read, self._pipe = os.pipe()
        with tempfile.TemporaryFile() as context:
            context.write(json.dumps(body.get("context")).encode())
            context.seek(0)
            self._keeper = subprocess.Popen(
                [sys.executable, __file__, "--keep", str(read), "--", *command],
                stdin=context,
                env=os.environ | self._environment(body),
                pass_fds=(read,),
                start_new_session=True,
            )
        os.close(read)
        self._lock = threading.Lock()

    def _environment(self, body: dict[str, Any]) -> dict[str, str]:
        return {
            "TENUTO_CALLBACK_URL": body["callback"]["url"],
            "TENUTO_CALLBACK_TOKEN": body["callback"]["token"],
            "TENUTO_AGENT_ID": body["agentId"],
            "TENUTO_TASK_ID": body["taskId"],
            "TENUTO_SESSION_KEY": self.key,
        }

    @property
    def runs(self) -> bool:
        return self._keeper.poll() is None

    def kill(self) -> bool:
        """End everything of it; whether it still ran."""
        with self._lock:
            ran = self.runs
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1
        self._keeper.wait(GRACE_S)
        return ran


class Sessions:
    """All sessions by their keys; asked twice with one idempotency key, the same one."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._by_key: OrderedDict[str, Session] = OrderedDict()
        self._by_wish: dict[str, str] = {}

    def spawn(self, body: dict[str, Any]) -> str:
        wish = str(body.get("idempotencyKey") or uuid.uuid4())
        with self._lock:
            if wish not in self._by_wish:
                session = Session(body, self._command)
                self._by_wish[wish] = session.key
                self._by_key[session.key] = session
                self._forget()
            return self._by_wish[wish]

    def kill(self, key: str) -> bool | None:
        """Whether it still ran; nothing for a session that never was."""
        with self._lock:
            session = self._by_key.get(key)
        return None if session is None else session.kill()

    def _forget(self) -> None:
        """Let the oldest go that have ended, so that memory has a bound."""
        for key, session in list(self._by_key.items())[: max(0, len(self._by_key) - REMEMBERED)]:
            if not session.runs:
                session.kill()
                del self._by_key[key]
                self._by_wish = {w: k for w, k in self._by_wish.items() if k != key}


class Handler(BaseHTTPRequestHandler):
    """The two calls of the protocol."""

    sessions: Sessions
    token: str
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        said = self.headers.get("authorization", "")
        if self.token and not hmac.compare_digest(said.encode(), f"Bearer {self.token}".encode()):
            self._answer(401, {"error": "the token is wrong"})
        elif self.path == "/api/agents/spawn":
            self._spawn(body)
        elif match := KILL.fullmatch(self.path):
            ran = self.sessions.kill(match[1])
            status = 404 if ran is None else 200
            self._answer(status, {"killed": bool(ran)})
        else:
            self._answer(404, {"error": "no such path"})

    def _body(self) -> Any:
        try:
            size = int(self.headers.get("content-length", ""))
            return json.loads(self.rfile.read(size)) if 0 < size <= MAX_BODY else None
        except ValueError:
            return None

    def _spawn(self, body: Any) -> None:
        try:
            key = self.sessions.spawn(checked(body))
        except ValueError as error:
            self._answer(400, {"error": str(error)})
        except OSError as error:
            self._answer(503, {"error": f"cannot start a process: {error}"})
        else:
            self._answer(200, {"session": {"sessionKey": key}})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> int:
    parser = argparse.ArgumentParser(description="A gateway that spawns a process per session.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000, help="0: any free one, which is printed")
    parser.add_argument("--keep", type=int, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="what to run; else the agent beside this file")
    given = parser.parse_args()
    if given.keep is not None:
        return keep(given.keep, given.command)
    Handler.sessions = Sessions(given.command or [sys.executable, str(AGENT)])
    Handler.token = os.environ.get("GATEWAY_TOKEN", "")
    server = Server((given.host, given.port), Handler)
    print(f"gateway on http://{given.host}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
