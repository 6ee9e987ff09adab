"""The recorder: a file outside the tested system to which clients and tasks append lines.

Handlers, commands and clients write to it directly, so that the record does not depend on the code
under test. Lines are written with one write to a file opened for appending: a killed writer leaves
only complete lines.
"""

import os
from collections import Counter, defaultdict
from pathlib import Path

RECORD_VARIABLE = "CHAOS_RECORD"
"""Environment variable with the path of the file."""


def append_lines(*lines: str) -> None:
    """Appends lines to the recorder's file, all or none."""
    file = os.open(os.environ[RECORD_VARIABLE], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(file)


class Recorder:
    """Reads the file that clients and tasks write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acknowledged: dict[str, str] = {}
        """Acknowledged task id by idempotency key."""
        self.conflicting_ids: list[str] = []
        """Idempotency keys that were acknowledged with two different ids."""
        self.starts: Counter[str] = Counter()
        """Number of started executions by task."""
        self.ended: set[tuple[str, int]] = set()
        """Executions that reached their end, as (task, attempt)."""
        self.lost_checkpoints: list[str] = []
        """Tasks with an attempt that started from an older checkpoint than one saved before."""
        self._saved: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._offset = 0

    def read(self) -> "Recorder":
        """Adds the lines written since the last call to its fields and returns itself."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.decode().splitlines():
            kind, *fields = line.split()
            getattr(self, f"_{kind}")(*fields)
        return self

    def _ack(self, key: str, task: str) -> None:
        """Stores an acknowledged task id, or the key as conflicting if it had another id."""
        if self.acknowledged.setdefault(key, task) != task:
            self.conflicting_ids.append(key)

    def _start(self, task: str, attempt: str, checkpoint: str) -> None:
        """Counts a start, and detects a checkpoint older than a saved one."""
        # A zombie may start after later attempts have saved: compare only with earlier attempts.
        self.starts[task] += 1
        saved = [n for other, n in self._saved[task].items() if other < int(attempt)]
        if int(checkpoint) < max(saved, default=0):
            self.lost_checkpoints.append(task)

    def _save(self, task: str, attempt: str, checkpoint: str) -> None:
        """Stores the checkpoint number that an attempt saved."""
        self._saved[task][int(attempt)] = int(checkpoint)

    def _end(self, task: str, attempt: str) -> None:
        """Stores that an attempt ran to its end."""
        self.ended.add((task, int(attempt)))
