"""The recorder outside the system: a file to which every witness adds whole lines.

Handlers, commands and clients write there themselves, so that what they saw does not depend on
anything that is being tested. A line is one write, and the file is opened for appending: a killed
writer leaves whole lines.
"""

import os
from collections import Counter, defaultdict
from pathlib import Path

FILE = "CHAOS_RECORD"
"""The variable that names the file."""


def note(*lines: str) -> None:
    """Add lines, all or none."""
    file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(file)


class Recorder:
    """What the witnesses wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acknowledged: dict[str, str] = {}
        """The id that a client was told, by the key it asked under."""
        self.contradicted: list[str] = []
        """Keys that were answered with two ids."""
        self.starts: Counter[str] = Counter()
        """How many executions of each task began."""
        self.ended: set[tuple[str, int]] = set()
        """The executions that came to their end, by task and attempt."""
        self.forgotten: list[str] = []
        """Tasks that an attempt was started on with less than an earlier one had saved."""
        self._saved: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._read = 0

    def read(self) -> "Recorder":
        """Take in what was written since."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode().splitlines():
            what, *words = line.split()
            getattr(self, f"_{what}")(*words)
        return self

    def _ack(self, key: str, task: str) -> None:
        if self.acknowledged.setdefault(key, task) != task:
            self.contradicted.append(key)

    def _start(self, task: str, attempt: str, checkpoint: str) -> None:
        # A zombie may begin long after later attempts have saved: only those before it count.
        self.starts[task] += 1
        before = [n for each, n in self._saved[task].items() if each < int(attempt)]
        if int(checkpoint) < max(before, default=0):
            self.forgotten.append(task)

    def _save(self, task: str, attempt: str, checkpoint: str) -> None:
        self._saved[task][int(attempt)] = int(checkpoint)

    def _end(self, task: str, attempt: str) -> None:
        self.ended.add((task, int(attempt)))
