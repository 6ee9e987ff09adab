"""Records which functions of the program run: the files and the calls of a walk through it."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Self

import tenuto

_SOURCE = f"{Path(tenuto.__file__).parent}/"
_UNCOUNTED = frozenset(
    {
        *("clock.py", "crash_points.py", "metrics.py", "tracing.py"),
        *("model/bounds.py", "model/errors.py"),
    }
)
"""Files that every walk uses and that decide nothing about a task."""
_HEARTBEAT_THREAD = "tenuto-heartbeat"


class Walk:
    """Records calls between two functions, on all threads that start within `with`.

    The heartbeat's thread is left out: it works at fixed times for all tasks together.
    """

    def __init__(self, first: Callable[..., Any], last: Callable[..., Any]) -> None:
        """Prepares a record from the call of `first` until `last` is called."""
        self._first, self._last = _code_of(first), _code_of(last)
        self._is_armed = False
        self._is_recording = False
        self._calls: Counter[CodeType] = Counter()

    def __enter__(self) -> Self:
        threading.setprofile(self._observe)
        sys.setprofile(self._observe)
        return self

    def __exit__(self, *_raised: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        self._is_recording = False

    def arm(self) -> None:
        """Starts to record at the next call of the first function."""
        self._is_armed = True

    @property
    def is_over(self) -> bool:
        """True if something was recorded, and the last function was called."""
        return bool(self._calls) and not self._is_recording

    @property
    def files(self) -> list[str]:
        """The files that count, relative to the package, sorted."""
        return sorted({_file_of(code) for code in self._calls} - _UNCOUNTED)

    @property
    def calls(self) -> int:
        """The calls of functions in the files that count; resuming a coroutine is a call, too."""
        return sum(n for code, n in self._calls.items() if _file_of(code) not in _UNCOUNTED)

    def report(self) -> str:
        """Returns a line per file with its functions and their calls, most calls first."""
        by_file: dict[str, Counter[str]] = {}
        for code, n in self._calls.items():
            by_file.setdefault(_file_of(code), Counter())[code.co_qualname] += n
        lines = [f"{self.calls} calls in {len(self.files)} files"]
        for file, functions in sorted(by_file.items(), key=lambda item: -item[1].total()):
            names = ", ".join(f"{name} x{n}" for name, n in functions.most_common())
            lines.append(f"{functions.total():5} {file}: {names}")
        return "\n".join(lines)

    def _observe(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Counts a call. The interpreter calls this at each call and return of a function."""
        if event != "call" or not (self._is_armed or self._is_recording):
            return
        code = frame.f_code
        if self._is_armed and code is self._first:
            self._is_armed, self._is_recording = False, True
        elif code is self._last:
            self._is_recording = False
        if not self._is_recording or not code.co_filename.startswith(_SOURCE):
            return
        if threading.current_thread().name != _HEARTBEAT_THREAD:
            self._calls[code] += 1


def _code_of(function: Callable[..., Any]) -> CodeType:
    assert isinstance(function, FunctionType)
    return function.__code__


def _file_of(code: CodeType) -> str:
    """Returns the file of a function, relative to the package."""
    return code.co_filename.removeprefix(_SOURCE)
