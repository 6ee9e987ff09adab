"""Strikes secret values out of text and JSON, in every spelling they are likely to have."""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec

MASK = "***"
LEAST = 4
"""Shorter values are words of everyday: striking them would spoil more than it hides."""
LEAST_LINE = 8
"""A line of a secret that has several is struck on its own from this length on."""
_LEAST_INNER = 6
_FOR_PAGES = re.compile("[<>&\u2028\u2029]")
"""What is escaped so that JSON may stand in a page."""
_LEFT = ("/", "", "!~*'()", ";,/?:@&=+$#!~*'()")
"""What is left as it is in paths, in their parts, and by a browser's two functions for either."""
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")
_PERCENT = re.compile("%[0-9A-F]{2}")


class Redactor:
    """Knows some secret values. Text that it has struck is never longer than before."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._words = sorted(
            {word for secret in secrets for word in secret_variants(secret)}, key=len
        )
        self.reach = len(self._words[-1]) if self._words else 0
        """The length of the longest spelling."""

    def text(self, value: str) -> str:
        """The text with a mask for each stretch in which secrets stand."""
        kept, done = [], 0
        for start, end in self._found(value):
            kept += [value[done:start], MASK]
            done = end
        return "".join([*kept, value[done:]]) if kept else value

    def value(self, value: Any) -> Any:
        """The JSON value with its texts and keys struck; a number that spells a secret is too."""
        if not self._words:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            spelled = str(value)
            return value if self.text(spelled) == spelled else MASK
        return value

    def json(self, text: str | None) -> str | None:
        """The same for a value that is JSON text already."""
        if not self._words or text is None:
            return text
        return msgspec.json.encode(self.value(msgspec.json.decode(text))).decode()

    def cut(self, value: str) -> int:
        """Where a text that goes on may be cut, so that no part holds a piece of a secret."""
        place = max(len(value) - self.reach, 0)
        for start, end in self._found(value):
            if start < place < end:
                return end
        return place

    def _found(self, value: str) -> Iterator[tuple[int, int]]:
        """The stretches in which secrets stand, in order; those that overlap are one."""
        words = [word for word in self._words if word in value]
        first = last = 0
        for start, end in sorted(span for word in words for span in _spans(value, word)):
            if start < last:
                last = max(last, end)
                continue
            if last:
                yield first, last
            first, last = start, end
        if last:
            yield first, last


NOTHING = Redactor()
"""Knows no secrets."""


def _spans(value: str, word: str) -> Iterator[tuple[int, int]]:
    start = value.find(word)
    while start >= 0:
        yield start, start + len(word)
        start = value.find(word, start + 1)


def secret_variants(secret: str) -> Iterator[str]:
    """The value and its lines as they are, and the value as JSON, addresses and base64 spell it."""
    yield from (line for line in secret.splitlines() if len(line) >= LEAST_LINE)
    for part in (secret, secret.strip()):
        if len(part) >= LEAST:
            yield from _encodings(part)


def _encodings(part: str) -> Iterator[str]:
    yield part
    yield from _json(part)
    raw = part.encode("utf-8", "surrogatepass")
    yield from _percent(raw)
    for spelled in _base64(raw):
        yield spelled
        yield spelled.replace("+", "-").replace("/", "_")


def _json(part: str) -> Iterator[str]:
    """In JSON: what has to be escaped, and what Go and PHP escape besides."""
    for ascii_only in (True, False):
        spelled = json.dumps(part, ensure_ascii=ascii_only)[1:-1]
        yield spelled
        yield spelled.replace("/", "\\/")
        yield _FOR_PAGES.sub(lambda found: f"\\u{ord(found[0]):04x}", spelled)
        # Between backslashes that are escaped themselves, so that each one left begins an escape.
        pieces = spelled.split("\\\\")
        yield "\\\\".join(
            _ESCAPE.sub(lambda found: f"\\u{found[1].upper()}", each) for each in pieces
        )


def _percent(raw: bytes) -> Iterator[str]:
    """In addresses and forms; programs differ in what they leave as it is."""
    forms = (quote_plus(raw), quote_plus(raw, safe="*").replace("~", "%7E"))
    for spelled in (*(quote(raw, safe=safe) for safe in _LEFT), *forms):
        yield spelled
        yield _PERCENT.sub(lambda found: found[0].lower(), spelled)


def _base64(raw: bytes) -> Iterator[str]:
    """Base64 of the bytes alone, and of them inside something longer, wherever they begin."""
    yield b64encode(raw).decode()
    yield b64encode(raw).decode().rstrip("=")
    for before in range(3):
        # Each character tells six bits: only those that tell of nothing else are sure.
        sure = slice((before * 8 + 5) // 6, (before + len(raw)) * 8 // 6)
        inner = b64encode(bytes(before) + raw).decode()[sure]
        if len(inner) >= _LEAST_INNER:
            yield inner
