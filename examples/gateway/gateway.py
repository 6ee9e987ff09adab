"""An example gateway for push dispatch: starts a process per session. Standard library only.

    python examples/gateway/gateway.py --port 9000
    python examples/gateway/gateway.py --port 9000 -- my-agent --flag

Sessions get the task as JSON on standard input, and the address and token for their reports in the
environment. They stop when the gateway exits or crashes: each runs under a keeper process that
kills its process group when the pipe from the gateway closes.
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
MAX_SESSIONS = 10_000
KILL = re.compile(r"/api/agents/sessions/([^/]+)/kill")
AGENT = Path(__file__).with_name("agent.py")


def supervise(pipe: int, command: list[str]) -> int:
    """Runs a command in its own process group; returns its exit status.

    Kills the group when the command exits or the other end of the pipe closes.
    """
    child = subprocess.Popen(command, start_new_session=True)

    def kill_when_closed() -> None:
        os.read(pipe, 1)
        signal_group(child.pid, signal.SIGKILL)

    threading.Thread(target=kill_when_closed, daemon=True).start()
    code = child.wait()
    signal_group(child.pid, signal.SIGKILL)
    return code


def signal_group(group: int, signal_number: int) -> None:
    try:
        os.killpg(group, signal_number)
    except (ProcessLookupError, PermissionError):
        return


def validate_spawn(body: Any) -> dict[str, Any]:
    """Returns the body of a spawn request; raises `ValueError` if it is invalid."""
    if not isinstance(body, dict) or not isinstance(body.get("callback"), dict):
        raise ValueError("the body must be an object with an object `callback`")  # noqa: TRY004  400
    fields = {**body, **{f"callback.{name}": value for name, value in body["callback"].items()}}
    for name in ("agentId", "taskId", "callback.url", "callback.token"):
        if not isinstance(fields.get(name), str) or "\0" in fields[name]:
            raise ValueError(f"{name} must be a text without null characters")
    return body


class Session:
    """A running command and its keeper process."""

    def __init__(self, body: dict[str, Any], command: list[str]) -> None:
        self.key = uuid.uuid4().hex
        read, self._pipe = os.pipe()
        with tempfile.TemporaryFile() as context:
            context.write(json.dumps(body.get("context")).encode())
            context.seek(0)
            self._keeper = subprocess.Popen(
                [sys.executable, __file__, "--keep", str(read), "--", *command],
                stdin=context,
                env=os.environ | self._build_environment(body),
                pass_fds=(read,),
                start_new_session=True,
            )
        os.close(read)
        self._lock = threading.Lock()

    def _build_environment(self, body: dict[str, Any]) -> dict[str, str]:
        return {
            "TENUTO_CALLBACK_URL": body["callback"]["url"],
            "TENUTO_CALLBACK_TOKEN": body["callback"]["token"],
            "TENUTO_AGENT_ID": body["agentId"],
            "TENUTO_TASK_ID": body["taskId"],
            "TENUTO_SESSION_KEY": self.key,
        }

    @property
    def is_running(self) -> bool:
        return self._keeper.poll() is None

    def kill(self) -> bool:
        """Kills the process group; returns true if the session was running."""
        with self._lock:
            was_running = self.is_running
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1
        self._keeper.wait(GRACE_S)
        return was_running


class Sessions:
    """All sessions by key; requests with the same idempotency key get the same session."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._by_key: OrderedDict[str, Session] = OrderedDict()
        self._key_by_request: dict[str, str] = {}

    def spawn(self, body: dict[str, Any]) -> str:
        request = str(body.get("idempotencyKey") or uuid.uuid4())
        with self._lock:
            if request not in self._key_by_request:
                session = Session(body, self._command)
                self._key_by_request[request] = session.key
                self._by_key[session.key] = session
                self._evict_ended()
            return self._key_by_request[request]

    def kill(self, key: str) -> bool | None:
        """Kills a session; returns true if it was running, `None` if it does not exist."""
        with self._lock:
            session = self._by_key.get(key)
        return None if session is None else session.kill()

    def _evict_ended(self) -> None:
        """Removes the oldest ended sessions above the limit, so that memory is bounded."""
        for key, session in list(self._by_key.items())[: max(0, len(self._by_key) - MAX_SESSIONS)]:
            if not session.is_running:
                session.kill()
                del self._by_key[key]
                self._key_by_request = {
                    request: session_key
                    for request, session_key in self._key_by_request.items()
                    if session_key != key
                }


class Handler(BaseHTTPRequestHandler):
    """Serves the two requests of the protocol."""

    sessions: Sessions
    token: str
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._read_body()
        token = self.headers.get("authorization", "").encode()
        if self.token and not hmac.compare_digest(token, f"Bearer {self.token}".encode()):
            self._respond(401, {"error": "the token is wrong"})
        elif self.path == "/api/agents/spawn":
            self._spawn(body)
        elif match := KILL.fullmatch(self.path):
            was_running = self.sessions.kill(match[1])
            status = 404 if was_running is None else 200
            self._respond(status, {"killed": bool(was_running)})
        else:
            self._respond(404, {"error": "no such path"})

    def _read_body(self) -> Any:
        try:
            size = int(self.headers.get("content-length", ""))
            return json.loads(self.rfile.read(size)) if 0 < size <= MAX_BODY else None
        except ValueError:
            return None

    def _spawn(self, body: Any) -> None:
        try:
            key = self.sessions.spawn(validate_spawn(body))
        except ValueError as error:
            self._respond(400, {"error": str(error)})
        except OSError as error:
            self._respond(503, {"error": f"cannot start a process: {error}"})
        else:
            self._respond(200, {"session": {"sessionKey": key}})

    def _respond(self, status: int, body: dict[str, Any]) -> None:
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
    parser = argparse.ArgumentParser(description="A gateway that starts a process per session.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000, help="0: a free port, which is printed")
    parser.add_argument("--keep", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "command", nargs="*", help="the session's command; default: agent.py beside this file"
    )
    options = parser.parse_args()
    if options.keep is not None:
        return supervise(options.keep, options.command)
    Handler.sessions = Sessions(options.command or [sys.executable, str(AGENT)])
    Handler.token = os.environ.get("GATEWAY_TOKEN", "")
    server = Server((options.host, options.port), Handler)
    print(f"gateway on http://{options.host}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
