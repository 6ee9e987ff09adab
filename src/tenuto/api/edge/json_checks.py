"""Whether a body is JSON that every reader understands alike: valid, and no name given twice."""

import asyncio
import json
import re
from collections import Counter
from typing import Any
from uuid import UUID

import msgspec

from tenuto.api.edge.rotation import Turns
from tenuto.model.errors import Invalid

INLINE_BYTES = 64 * 1024
"""Bytes up to which a body is checked on the loop; it takes less than a change of thread costs."""
AT_ONCE = 2
"""Large bodies that are checked at the same time; each takes a thread and a lot of memory."""
MOST_VALUES = 1_000_000
"""Names and elements in one body: decoding it happens on the loop, and costs by their number."""

_VALID = msgspec.json.Decoder(msgspec.Raw)
# What stands between, a string with or without the colon that makes it a name, or a brace. Nothing
# is given back once it matched, so the search is linear. Only for text that is known to be JSON.
_TOKEN = re.compile(
    rb'[^"{}]*+(?:"([^"\\]*+(?:\\.[^"\\]*+)*+)"(?:[ \t\n\r]*+(:))?+|([{}])|\Z)', re.DOTALL
)
_NAME, _BRACE = 2, 3


class Checks:
    """Checks bodies: small ones at once, large ones in a thread while the loop goes on."""

    def __init__(self) -> None:
        self._turns = Turns(AT_ONCE)

    async def check(self, body: bytes, holder: UUID | None) -> None:
        """Raises `Invalid` unless the body is JSON that has one meaning.

        Large bodies of one holder, a workspace, are checked one after the other.
        """
        if len(body) <= INLINE_BYTES:
            check_small(body)
            return
        async with self._turns.turn(holder):
            await asyncio.to_thread(check_large, body)


def check_small(body: bytes) -> None:
    """The check by the standard library: fast, but it holds the interpreter until it is done."""
    try:
        json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise _not_json(error) from error


def check_large(body: bytes) -> None:
    """The same check in a thread beside the loop: no step of it holds the interpreter for long."""
    try:
        _VALID.decode(body)
        body.decode()  # the decoder takes strings as they are
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from error
    _check_names(body)


def _check_names(body: bytes) -> None:
    """Raises `Invalid` for a name that one object has twice, and for too many values."""
    most = body.count(b",") + body.count(b"{") + body.count(b"[")  # those in strings included
    values = _Values() if most >= MOST_VALUES else None
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
                raise _twice(name.decode())
            names.add(name)
        elif kind == _BRACE:
            if token[_BRACE] == b"{":
                outer.append(names)
                names = set()
            else:
                names = outer.pop()


class _Values:
    """Counts the values of a body: each comma and each opening bracket makes one."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, token: re.Match[bytes]) -> None:
        """Counts what stands before a token's string, and its brace; raises beyond the bound."""
        start, end = token.span()
        if token.start(1) >= 0:
            end = token.start(1)
        body = token.string
        self._count += body.count(b",", start, end) + body.count(b"[", start, end)
        self._count += token[_BRACE] == b"{"
        if self._count >= MOST_VALUES:
            raise Invalid(
                f"a body has at most {MOST_VALUES:,} names and elements", "too_many_values"
            )


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _twice(next(name for name, count in counts.items() if count > 1))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _twice(name: str) -> Invalid:
    return Invalid(f"the name {name[:60]!r} is given twice", "invalid_json")


def _too_deep() -> Invalid:
    return Invalid("the body is nested too deep", "too_deep")


def _not_json(error: Exception) -> Invalid:
    return Invalid(f"the body is not JSON: {str(error)[:200]}", "invalid_json")
