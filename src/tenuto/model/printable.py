"""Escapes text from strangers before people see it: in logs, on terminals, in alerts and in YAML.

A character is hidden when a terminal or a viewer acts upon it instead of showing it: controls with
line ends, ESC and NUL (C0, DEL and C1), U+2028 and U+2029, characters that change the direction of
writing or have no width, and lone surrogates.
"""

import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_HARMLESS = frozenset("\u00ad\u200c\u200d")
"""Soft hyphen and the joiners: words and emoji need them."""


def is_hidden(char: str) -> bool:
    """True if the character is not shown as it is."""
    return char not in _HARMLESS and unicodedata.category(char) in _HIDDEN


def printable(text: str, *, lines: bool = False) -> str:
    """Returns the text on one line, with an escape for every hidden character.

    With `lines`, line ends and tabs stay.
    """
    return _replaced(text, "\n\t" if lines else "", _escape)


def indented(text: str, prefix: str) -> str:
    """Returns printable text whose further lines begin with the prefix: none can forge ours."""
    return printable(text.rstrip("\n"), lines=True).replace("\n", f"\n{prefix}")


def printable_json(value: Any) -> str:
    """Returns the value as one line of JSON, with an escape of JSON for every hidden character."""
    # Outside of strings JSON has none of these characters, so an escape is valid where they are.
    return _replaced(msgspec.json.encode(value).decode(), "", _json_escape)


def encodable(text: str) -> str:
    """Returns the text with an escape for every lone surrogate, which no encoding can hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _replaced(text: str, kept: str, escape: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    hidden = filter(is_hidden, set(text) - set(kept))
    return text.translate({ord(char): escape(char) for char in hidden})


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
