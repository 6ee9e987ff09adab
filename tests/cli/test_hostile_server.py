"""An untrusted server: its texts can neither forge lines nor control the terminal."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.cli.orchestrate import Answer, Orchestrate, Remote
from tests.observability.hostile import HIDDEN, HOSTILE

EVIL = f"no such task\nerror: forged [internal]\n{HOSTILE}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/api/v1/definitions"):
            self._answer(200, "application/json", {"manifest": EVIL})
            return
        problem = {"title": EVIL, "status": 404, "code": "not_found", "detail": EVIL}
        self._answer(404, "application/problem+json", problem)

    do_POST = do_GET  # noqa: N815  the name that the library calls

    def _answer(self, status: int, kind: str, reported: object) -> None:
        body = json.dumps(reported).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def remote(cli: Orchestrate) -> Iterator[Remote]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Remote(cli.home, f"http://127.0.0.1:{server.server_port}", "tnt_0123456789")
        server.shutdown()


def check(answer: Answer) -> None:
    lines = (answer.out + answer.err).split("\n")
    assert [line for line in lines if HIDDEN.search(line)] == []
    assert len([line for line in lines if line.startswith("error:")]) == (0 if answer.out else 1)


@pytest.mark.parametrize(
    "words", ["task list", "task create --name x", "agent list", "flow list", "login"], ids=str
)
def test_error_of_a_server_is_printed_on_its_own_lines(remote: Remote, words: str) -> None:
    login = [remote.url, "--token", remote.token] if words == "login" else []
    answer = remote(*words.split(), *login)
    assert answer.code == 1
    assert answer.err.startswith("error: no such task\n  error: forged [internal]\n")
    check(answer)
    output = remote("--json", *words.split(), *login)
    check(output)
    assert "forged" in json.loads(output.out)["error"]["message"]


def test_stack_trace_of_a_server_is_printed_on_its_own_lines(remote: Remote) -> None:
    remote.environment["TENUTO_DEBUG"] = "1"
    answer = _raw(remote, "task", "list")
    assert "  Traceback" in answer
    assert not HIDDEN.search(answer.replace("\n", ""))
    assert [line for line in answer.split("\n") if line.startswith("error:")][1:] == []


def _raw(remote: Remote, *words: str) -> str:
    process = remote.start(*words)
    out, err = process.communicate(timeout=60)
    return (out + err).decode()
