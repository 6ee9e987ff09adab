"""An attempt's transcript: lines gathered, capped and written behind the attempt's back."""

import asyncio
import logging

from tenuto.model.bounds import clean
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line, full_text
from tenuto.model.tenancy.redact import Redactor
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.retry_store import LATER, retry_delays

log = logging.getLogger("tenuto.worker")

LEVELS = frozenset({"DEBUG", "INFO", "WARN", "ERROR", "CRITICAL"})
GATHER_S = 0.2
LONGEST_LINE = 16_384
MOST_LINES = 500


class Transcript:
    """What one attempt said."""

    def __init__(
        self, engine: WorkerEngine, fence: Fence, most_kb: int, redactor: Redactor
    ) -> None:
        self._engine = engine
        self._fence = fence
        self._redactor = redactor
        self._most_kb = most_kb
        self._room = most_kb * 1024
        self._next = 0
        self._waiting: list[Line] = []
        self._flushing: asyncio.Task[None] | None = None
        self._full = False

    @property
    def full(self) -> bool:
        """Whether nothing more is kept."""
        return self._full

    def add(self, level: str, text: str) -> None:
        """Remember text, line by line; beyond the cap one last line says so."""
        level = level if isinstance(level, str) and level in LEVELS else "INFO"
        for line in self._redactor.text(text).splitlines() or [""]:
            for start in range(0, max(len(line), 1), LONGEST_LINE):
                self._line(level, line[start : start + LONGEST_LINE])

    def _line(self, level: str, text: str) -> None:
        if self._full:
            return
        line = Line(self._next, level, clean(text, LONGEST_LINE))
        self._room -= line.size
        if self._room < 0:
            self._full = True
            line = Line(self._next, "WARN", full_text(self._most_kb))
        self._waiting.append(line)
        self._next += 1
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush_soon())

    async def close(self) -> None:
        """Everything said so far is stored, unless the store refuses; while it is away, we wait."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            self._flushing = None
        await self._flush()

    async def _flush_soon(self) -> None:
        while True:
            await self._engine.clock.sleep(GATHER_S)
            await self._flush()
            if not self._waiting:
                self._flushing = None
                return

    async def _flush(self) -> None:
        pauses = retry_delays()
        while self._waiting:
            lines = self._waiting[:MOST_LINES]
            try:
                await self._engine.append(self._fence, lines)
            except LATER as error:
                log.warning("transcript of %s not written yet: %s", self._fence.task, error)
                await self._engine.clock.sleep(next(pauses))
                continue
            except TenutoError as error:
                log.warning("transcript of %s refused: %s", self._fence.task, error)
            self._waiting = self._waiting[len(lines) :]
