"""The real `orchestrate` as a process on a data folder of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = Path(sys.executable).with_name("orchestrate")
PATIENCE = 60.0


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
        done = subprocess.run(
            [PROGRAM, *words],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            cwd=self.home,
            env=self.environment | environment,
            timeout=PATIENCE,
            check=False,
        )
        answer = Answer(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert "Traceback" not in answer.out + answer.err
        return answer

    def ok(self, *words: str, stdin: str | bytes = b"") -> str:
        """What a command that must succeed prints."""
        answer = self(*words, stdin=stdin)
        assert answer.code == 0, answer
        return answer.out.strip()

    def json(self, *words: str) -> Any:
        """The document that a command that must succeed prints with `--json`."""
        return json.loads(self.ok("--json", *words))

    def start(self, *words: str, **streams: Any) -> "subprocess.Popen[bytes]":
        """A command that runs on; whoever starts it ends it."""
        pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        pipes |= {"stdin": subprocess.DEVNULL, **streams}
        return subprocess.Popen(
            [PROGRAM, *words],
            cwd=self.home,
            env=self.environment,
            start_new_session=True,
            **pipes,
        )
