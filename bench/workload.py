"""The task that every peer runs, and the journal in which the task records its start."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

PAYLOAD_SIZE = 200
_RECORD = struct.Struct("<qq")


def make_payload(index: int, sleep_ms: int = 0) -> str:
    """Returns 200 ASCII characters with the number of a task and its sleep time."""
    payload = f"{index:08d}{sleep_ms:08d}".ljust(PAYLOAD_SIZE, "x")
    assert len(payload) == PAYLOAD_SIZE
    return payload


def make_payloads(count: int) -> list[str]:
    """Returns the payloads of `count` no-op tasks, numbered from 0."""
    return [make_payload(index) for index in range(count)]


class Journal:
    """Starts of tasks as (index, time in ns), appended by workers and read by the harness.

    One record is one small `O_APPEND` write, so threads and forked children may share it.
    It costs every peer the same system call and does not use the measured store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def record_start(self, payload: str) -> float:
        """Records that this task starts now; returns the seconds that it must sleep."""
        os.write(self._fd, _RECORD.pack(int(payload[:8]), time.time_ns()))
        return int(payload[8:16]) / 1000

    def count_starts(self) -> int:
        """Returns the number of recorded starts, including repeated ones."""
        return self.path.stat().st_size // _RECORD.size

    def read_starts(self) -> Iterator[tuple[int, int]]:
        """Yields (index, start in ns) of every record, in the order of writing."""
        data = self.path.read_bytes()
        return _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])

    def read_last(self) -> tuple[int, int]:
        """Returns (index, start in ns) of the latest record."""
        return list(self.read_starts())[-1]
