"""Escapes untrusted text for people: in logs, on terminals, in alerts and in YAML.

A character is hidden if a terminal or viewer acts on it instead of showing it. Hidden characters
are control characters with line ends, ESC and NUL (C0, DEL and C1), U+2028 and U+2029, characters
that change the writing direction or have no width, and lone surrogates.
"""

import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_SHOWN_AS_IS = frozenset("\u00ad\u200c\u200d")
"""Soft hyphen and joiners: words and emoji need them."""


def is_hidden(char: str) -> bool:
    """True if the character is not shown as it is."""
    return char not in _SHOWN_AS_IS and unicodedata.category(char) in _HIDDEN


def printable(text: str, *, lines: bool = False) -> str:
    """Returns the text on one line, with an escape for every hidden character.

    With `lines`, line ends and tabs stay.
    """
    return _escape_hidden(text, "\n\t" if lines else "", _escape)


def indented(text: str, prefix: str) -> str:
    """Returns printable text whose further lines begin with `prefix`.

    Untrusted text then cannot imitate a line of the program's own output.
    """
    return printable(text.rstrip("\n"), lines=True).replace("\n", f"\n{prefix}")


def printable_json(value: Any) -> str:
    """Returns the value as one line of JSON, with a JSON escape for every hidden character."""
    # JSON has these characters only inside strings, so an escape is valid in their place.
    return _escape_hidden(msgspec.json.encode(value).decode(), "", _json_escape)


def encodable(text: str) -> str:
    """Returns the text with an escape for every lone surrogate, which cannot be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escape_hidden(text: str, keep: str, escape: Callable[[str], str]) -> str:
    """Returns the text with every hidden character escaped, except those in `keep`."""
    if text.isprintable():
        return text
    hidden = filter(is_hidden, set(text) - set(keep))
    return text.translate({ord(char): escape(char) for char in hidden})


def _escape(char: str) -> str:
    """Returns the Python escape of a character."""
    return char.encode("unicode_escape").decode()


def _json_escape(char: str) -> str:
    """Returns the JSON escape of a character; two units for one beyond 16 bits."""
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
