"""Redacts secret values in text and JSON, in every encoding in which they are likely to appear."""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec

MASK = "***"
MIN_LENGTH = 4
"""Shorter values are often ordinary words: redacting them would damage more than it protects."""
MIN_LINE_LENGTH = 8
"""A single line of a multi-line secret is redacted if it has at least this length."""
_MIN_INNER_LENGTH = 6
_HTML_UNSAFE = re.compile("[<>&\u2028\u2029]")
"""Characters that some programs escape so that JSON can be part of an HTML page."""
_URL_SAFE_SETS = ("/", "", "!~*'()", ";,/?:@&=+$#!~*'()")
"""Characters that URL encoders keep: for paths, for path parts, and by two browser functions.

The functions are encodeURIComponent and encodeURI.
"""
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")
_PERCENT = re.compile("%[0-9A-F]{2}")


class Redactor:
    """Redacts a set of secret values. Redacted text is never longer than the original."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._variants = sorted(
            {variant for secret in secrets for variant in secret_variants(secret)}, key=len
        )
        self.max_variant_length = len(self._variants[-1]) if self._variants else 0
        """The length of the longest encoding of a secret."""

    def redact_text(self, value: str) -> str:
        """Returns the text with a mask in place of each range that contains secrets."""
        parts, position = [], 0
        for start, end in self._secret_ranges(value):
            parts += [value[position:start], MASK]
            position = end
        return "".join([*parts, value[position:]]) if parts else value

    def redact_value(self, value: Any) -> Any:
        """Returns the JSON value redacted; a number whose text contains a secret becomes a mask."""
        if not self._variants:
            return value
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, dict):
            return {self.redact_value(key): self.redact_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_value(item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = str(value)
            return value if self.redact_text(text) == text else MASK
        return value

    def redact_json(self, text: str | None) -> str | None:
        """Returns the JSON text with its value redacted like `redact_value`; `None` for `None`."""
        if not self._variants or text is None:
            return text
        return msgspec.json.encode(self.redact_value(msgspec.json.decode(text))).decode()

    def safe_cut_position(self, value: str) -> int:
        """Returns where an incomplete text can be cut so that the cut splits no secret."""
        position = max(len(value) - self.max_variant_length, 0)
        for start, end in self._secret_ranges(value):
            if start < position < end:
                return end
        return position

    def _secret_ranges(self, value: str) -> Iterator[tuple[int, int]]:
        """Yields the ranges of the text that contain secrets, in order; overlapping ones merged."""
        variants = [word for word in self._variants if word in value]
        first = last = 0
        for start, end in sorted(span for word in variants for span in _occurrences(value, word)):
            if start < last:
                last = max(last, end)
                continue
            if last:
                yield first, last
            first, last = start, end
        if last:
            yield first, last


NO_SECRETS = Redactor()
"""A redactor without secrets: it changes nothing."""


def _occurrences(value: str, variant: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of every occurrence, including overlapping ones."""
    start = value.find(variant)
    while start >= 0:
        yield start, start + len(variant)
        start = value.find(variant, start + 1)


def secret_variants(secret: str) -> Iterator[str]:
    """Yields the value, its long lines, and the value as encoded in JSON, URLs and base64."""
    yield from (line for line in secret.splitlines() if len(line) >= MIN_LINE_LENGTH)
    for part in (secret, secret.strip()):
        if len(part) >= MIN_LENGTH:
            yield from _encodings(part)


def _encodings(part: str) -> Iterator[str]:
    """Yields the text itself, and the text as encoded in JSON, URLs and base64."""
    yield part
    yield from _json_encodings(part)
    raw = part.encode("utf-8", "surrogatepass")
    yield from _url_encodings(raw)
    for encoded in _base64_encodings(raw):
        yield encoded
        yield encoded.replace("+", "-").replace("/", "_")


def _json_encodings(part: str) -> Iterator[str]:
    """Yields the JSON encodings: with required escapes, and with those that Go and PHP add."""
    for ascii_only in (True, False):
        encoded = json.dumps(part, ensure_ascii=ascii_only)[1:-1]
        yield encoded
        yield encoded.replace("/", "\\/")
        yield _HTML_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", encoded)
        # Split at escaped backslashes, so that every remaining backslash begins an escape.
        parts = encoded.split("\\\\")
        yield "\\\\".join(
            _ESCAPE.sub(lambda match: f"\\u{match[1].upper()}", text) for text in parts
        )


def _url_encodings(raw: bytes) -> Iterator[str]:
    """Yields the encodings in URLs and forms; programs differ in the characters they keep."""
    forms = (quote_plus(raw), quote_plus(raw, safe="*").replace("~", "%7E"))
    for encoded in (*(quote(raw, safe=safe) for safe in _URL_SAFE_SETS), *forms):
        yield encoded
        yield _PERCENT.sub(lambda match: match[0].lower(), encoded)


def _base64_encodings(raw: bytes) -> Iterator[str]:
    """Yields base64 of the bytes alone, and of the bytes at any offset inside longer data."""
    yield b64encode(raw).decode()
    yield b64encode(raw).decode().rstrip("=")
    for prefix_length in range(3):
        # Each character encodes six bits; only characters that encode no other bytes are certain.
        certain = slice((prefix_length * 8 + 5) // 6, (prefix_length + len(raw)) * 8 // 6)
        inner = b64encode(bytes(prefix_length) + raw).decode()[certain]
        if len(inner) >= _MIN_INNER_LENGTH:
            yield inner
