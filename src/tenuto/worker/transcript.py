"""An attempt's transcript: buffers lines, caps their size, and stores them in the background."""

import asyncio
import logging

from tenuto.model.bounds import make_storable
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line, truncation_notice
from tenuto.model.tenancy.redact import Redactor
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.retry_store import RETRYABLE_ERRORS, retry_delays

log = logging.getLogger("tenuto.worker")

LEVELS = frozenset({"DEBUG", "INFO", "WARN", "ERROR", "CRITICAL"})
FLUSH_DELAY_S = 0.2
MAX_LINE_CHARS = 16_384
MAX_LINES_PER_WRITE = 500


class Transcript:
    """The transcript of one attempt, stored up to `max_kb` kilobytes."""

    def __init__(self, engine: WorkerEngine, fence: Fence, max_kb: int, redactor: Redactor) -> None:
        self._engine = engine
        self._fence = fence
        self._redactor = redactor
        self._max_kb = max_kb
        self._bytes_left = max_kb * 1024
        self._next_number = 0
        self._unwritten: list[Line] = []
        self._flush_task: asyncio.Task[None] | None = None
        self._is_full = False

    @property
    def is_full(self) -> bool:
        """True if the size limit is reached and later lines are dropped."""
        return self._is_full

    def add(self, level: str, text: str) -> None:
        """Buffers the redacted lines of `text`; a notice replaces those above the size limit."""
        level = level if isinstance(level, str) and level in LEVELS else "INFO"
        for line in self._redactor.redact_text(text).splitlines() or [""]:
            for start in range(0, max(len(line), 1), MAX_LINE_CHARS):
                self._add_line(level, line[start : start + MAX_LINE_CHARS])

    def _add_line(self, level: str, text: str) -> None:
        """Buffers one line; the line that exceeds the size limit is replaced by a final note."""
        if self._is_full:
            return
        line = Line(self._next_number, level, make_storable(text, MAX_LINE_CHARS))
        self._bytes_left -= line.size
        if self._bytes_left < 0:
            self._is_full = True
            line = Line(self._next_number, "WARN", truncation_notice(self._max_kb))
        self._unwritten.append(line)
        self._next_number += 1
        if self._flush_task is None:
            self._flush_task = asyncio.get_running_loop().create_task(self._flush_soon())

    async def flush(self) -> None:
        """Stores all buffered lines, drops refused ones; waits while the store is unavailable."""
        if self._flush_task is not None:
            self._flush_task.cancel()
            await asyncio.gather(self._flush_task, return_exceptions=True)
            self._flush_task = None
        await self._store_lines()

    async def _flush_soon(self) -> None:
        """Stores the buffered lines after a short delay, until none is left."""
        while True:
            await self._engine.clock.sleep(FLUSH_DELAY_S)
            await self._store_lines()
            if not self._unwritten:
                self._flush_task = None
                return

    async def _store_lines(self) -> None:
        """Stores the buffered lines in batches; retries outages, logs and drops refused lines."""
        delays = retry_delays()
        while self._unwritten:
            lines = self._unwritten[:MAX_LINES_PER_WRITE]
            try:
                await self._engine.append(self._fence, lines)
            except RETRYABLE_ERRORS as error:
                log.warning(
                    "transcript of task %s is not stored yet and is retried: %s",
                    self._fence.task,
                    error,
                )
                await self._engine.clock.sleep(next(delays))
                continue
            except TenutoError as error:
                log.warning(
                    "transcript lines of task %s were refused and dropped: %s",
                    self._fence.task,
                    error,
                )
            self._unwritten = self._unwritten[len(lines) :]
