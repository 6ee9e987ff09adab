"""Checks that a body is unambiguous JSON: valid, and without duplicate names in an object."""

import asyncio
import json
import re
from collections import Counter
from typing import Any
from uuid import UUID

import msgspec

from tenuto.api.edge.rotation import FairQueue
from tenuto.model.errors import Invalid

INLINE_BYTES = 64 * 1024
"""Largest body checked on the event loop; that is cheaper than a change of thread."""
MAX_CONCURRENT = 2
"""Large bodies checked at the same time; each takes a thread and a lot of memory."""
MAX_VALUES = 1_000_000
"""Maximum names and elements in one body: decoding runs on the loop and costs time for each."""

_VALID = msgspec.json.Decoder(msgspec.Raw)
# Other characters, then a string (a name if a colon follows) or a brace. All repetitions are
# possessive, so the search is linear. Use it only for text that is known to be valid JSON.
_TOKEN = re.compile(
    rb'[^"{}]*+(?:"([^"\\]*+(?:\\.[^"\\]*+)*+)"(?:[ \t\n\r]*+(:))?+|([{}])|\Z)', re.DOTALL
)
_NAME, _BRACE = 2, 3


class JsonChecker:
    """Checks bodies: small ones on the event loop, large ones in a thread."""

    def __init__(self) -> None:
        self._queue = FairQueue(MAX_CONCURRENT)

    async def check(self, body: bytes, holder: UUID | None) -> None:
        """Raises `Invalid` unless the body is unambiguous JSON.

        `holder` is the workspace; its large bodies are checked one after the other.
        """
        if len(body) <= INLINE_BYTES:
            check_small(body)
            return
        async with self._queue.acquire(holder):
            await asyncio.to_thread(check_large, body)


def check_small(body: bytes) -> None:
    """Raises `Invalid` unless the body is unambiguous JSON; holds the interpreter lock."""
    try:
        json.loads(body, object_pairs_hook=_check_unique_names, parse_constant=_reject_constant)
    except RecursionError as error:
        raise _too_deep_error() from error
    except ValueError as error:
        raise _not_json_error(error) from error


def check_large(body: bytes) -> None:
    """Raises `Invalid` as `check_small`, and for too many values; for threads: no lock for long."""
    try:
        _VALID.decode(body)
        body.decode()  # the decoder does not check UTF-8 in strings
    except RecursionError as error:
        raise _too_deep_error() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json_error(error) from error
    _check_names(body)


def _check_names(body: bytes) -> None:
    """Raises `Invalid` for a duplicate name in an object, and for too many values."""
    upper_bound = (
        body.count(b",") + body.count(b"{") + body.count(b"[")
    )  # includes those in strings
    values = _ValueCounter() if upper_bound >= MAX_VALUES else None
    outer: list[set[bytes]] = []
    names: set[bytes] = set()
    for token in _TOKEN.finditer(body):
        if values is not None:
            values.add(token)
        kind = token.lastindex
        if kind == _NAME:
            name = token[1]
            if b"\\" in name:
                name = msgspec.json.decode(b'"%b"' % name, type=str).encode()
            if name in names:
                raise _duplicate_name_error(name.decode())
            names.add(name)
        elif kind == _BRACE:
            if token[_BRACE] == b"{":
                outer.append(names)
                names = set()
            else:
                names = outer.pop()


class _ValueCounter:
    """Counts the values of a body: one for each comma and each opening bracket or brace."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, token: re.Match[bytes]) -> None:
        """Counts the values in a token, outside its string; raises `Invalid` at `MAX_VALUES`."""
        start, end = token.span()
        if token.start(1) >= 0:
            end = token.start(1)
        body = token.string
        self._count += body.count(b",", start, end) + body.count(b"[", start, end)
        self._count += token[_BRACE] == b"{"
        if self._count >= MAX_VALUES:
            raise Invalid(
                f"the body has more than {MAX_VALUES:,} names and elements", "too_many_values"
            )


def _check_unique_names(pairs: list[tuple[str, Any]]) -> None:
    """Raises `Invalid` if an object has a name twice."""
    if len({name for name, _ in pairs}) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _duplicate_name_error(next(name for name, count in counts.items() if count > 1))


def _reject_constant(name: str) -> None:
    """Raises `ValueError` for NaN and infinity, which Python's parser accepts."""
    raise ValueError(f"{name} is not JSON")


def _duplicate_name_error(name: str) -> Invalid:
    return Invalid(f"duplicate name {name[:60]!r} in an object", "invalid_json")


def _too_deep_error() -> Invalid:
    return Invalid("the body is nested too deep", "too_deep")


def _not_json_error(error: Exception) -> Invalid:
    return Invalid(f"the body is not valid JSON: {str(error)[:200]}", "invalid_json")
