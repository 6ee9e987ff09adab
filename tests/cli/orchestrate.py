"""The real `orchestrate` as a process on a data folder of its own."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.cli import fork_server
from tests.waiting import eventually_sync

PROGRAM = Path(sys.executable).with_name("orchestrate")
WAIT_S = 60.0


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


class Orchestrate:
    """Runs commands as a user with nothing but a data folder would."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.data = home / "data"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TENUTO_")}
        self.environment = inherited | {
            "TENUTO_PORT": "0",
            "HOME": str(home),
            "TENUTO_DATA": str(self.data),
            "TERM": "xterm-256color",
            "COLUMNS": "120",
        }
        self.environment.pop("NO_COLOR", None)

    def __call__(self, *words: str, stdin: str | bytes = b"", **environment: str) -> Answer:
        """The answer to a command line."""
        values = stdin.encode() if isinstance(stdin, str) else stdin
        done = fork_server.run(self._command(words, environment), values, WAIT_S)
        answer = Answer(done.code, done.out.decode(), done.err.decode())
        assert "Traceback" not in answer.out + answer.err
        return answer

    def ok(self, *words: str, stdin: str | bytes = b"") -> str:
        """Runs a command that must succeed and returns its output."""
        answer = self(*words, stdin=stdin)
        assert answer.code == 0, answer
        return answer.out.strip()

    def json(self, *words: str) -> Any:
        """The document that a command that must succeed prints with `--json`."""
        return json.loads(self.ok("--json", *words))

    def fork(self, *words: str, log: Path) -> fork_server.Forked:
        """A command that runs on and writes to a file; whoever starts it ends it."""
        with log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
            files = [nothing.fileno(), out.fileno(), out.fileno()]
            return fork_server.Forked(self._command(words, {}), files)

    def _command(self, words: Sequence[str], environment: dict[str, str]) -> fork_server.Command:
        return fork_server.Command(
            [os.fsencode(word) for word in (str(PROGRAM), *words)],
            str(self.home),
            self.environment | environment,
        )

    def start(self, *words: str, **streams: Any) -> "subprocess.Popen[bytes]":
        """The installed program, which runs on; whoever starts it ends it."""
        pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        pipes |= {"stdin": subprocess.DEVNULL, **streams}
        return subprocess.Popen(
            [PROGRAM, *words],
            cwd=self.home,
            env=self.environment,
            start_new_session=True,
            **pipes,
        )


class Remote(Orchestrate):
    """A command line whose server is elsewhere."""

    def __init__(self, home: Path, url: str, token: str) -> None:
        super().__init__(home)
        self.url = url
        self.token = token
        del self.environment["TENUTO_DATA"]
        self.environment |= {"TENUTO_URL": url, "TENUTO_TOKEN": token}


@contextmanager
def started(cli: Orchestrate, *words: str) -> Iterator[Path]:
    """A command that runs until the block ends, and then ends well; answers where it logs."""
    log = cli.home / f"{words[0]}.log"
    process = cli.fork(*words, log=log)
    try:
        yield log
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0, log.read_text()
    assert "Traceback" not in log.read_text()


@contextmanager
def serving(cli: Orchestrate, *words: str) -> Iterator[str]:
    """A server, by `serve` or the words, until the block ends; answers its address."""
    with started(cli, *(words or ("serve",))) as log:
        result = eventually_sync(
            lambda: re.search(r"API on ([\w.:/-]+)", log.read_text()), timeout=WAIT_S
        )
        eventually_sync((cli.data / "token").exists, timeout=WAIT_S)
        yield result[1]


def token_of(cli: Orchestrate) -> str:
    """The token of whoever started a server there."""
    return (cli.data / "token").read_text().strip()
