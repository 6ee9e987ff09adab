"""Redaction: no part of a secret is left in any usual encoding, and other text is unchanged."""

import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model.tenancy.redact import MASK, MIN_LENGTH, NO_SECRETS, Redactor

# The mask itself is no part of the words: a text that spells a secret around one is no leak.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="*")
SECRETS = st.text(CHARACTERS, min_size=MIN_LENGTH, max_size=40)
TEXTS = st.text(CHARACTERS, max_size=60)


def in_small_letters(text: str) -> str:
    return re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), text)


def in_capitals(character: str) -> str:
    spelled = json.dumps(character)[1:-1]
    return "\\u" + "\\u".join(spelled.upper().split("\\U")[1:]) if "\\u" in spelled else spelled


def as_go_does(text: str) -> str:
    spelled = json.dumps(text, ensure_ascii=False)[1:-1]
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", spelled)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "json": lambda s: json.dumps(s)[1:-1],
    "json utf-8": lambda s: msgspec.json.encode(s).decode()[1:-1],
    "json of Go": as_go_does,
    "json of PHP": lambda s: json.dumps(s)[1:-1].replace("/", "\\/"),
    "json in capitals": lambda s: "".join(map(in_capitals, s)),
    "path": quote,
    "address": lambda s: quote(s, safe=""),
    "form": quote_plus,
    "path in small letters": lambda s: in_small_letters(quote(s)),
    "address in small letters": lambda s: in_small_letters(quote(s, safe="")),
    "form in small letters": lambda s: in_small_letters(quote_plus(s)),
    "encodeURIComponent": lambda s: quote(s, safe="!~*'()"),
    "encodeURI": lambda s: quote(s, safe=";,/?:@&=+$#!~*'()"),
    "form of browsers": lambda s: quote_plus(s, safe="*").replace("~", "%7E"),
    "base64": lambda s: b64encode(s.encode()).decode(),
    "base64 for addresses": lambda s: urlsafe_b64encode(s.encode()).decode(),
    "base64 without padding": lambda s: b64encode(s.encode()).decode().rstrip("="),
}


@given(st.lists(SECRETS, min_size=1, max_size=4), st.lists(TEXTS, min_size=2, max_size=5))
def test_secret_is_redacted_in_every_encoding(secrets: list[str], around: list[str]) -> None:
    redactor = Redactor(secrets)
    for spell in SPELLINGS.values():
        pieces = [spell(secret) + text for text in around for secret in secrets]
        redacted = redactor.redact_text("".join(pieces))
        assert [item for item in secrets if spell(item) in redacted] == []


@given(st.binary(max_size=12), SECRETS, st.binary(max_size=12))
def test_secret_inside_base64_is_redacted(before: bytes, secret: str, after: bytes) -> None:
    raw = secret.encode()
    spelled = b64encode(before + raw + after).decode()
    redacted = Redactor([secret]).redact_text(spelled)
    if len(raw) > MIN_LENGTH:
        assert redacted.replace(MASK, "") != spelled
        # At most two characters at either end tell of the secret and its neighbour.
        assert len(redacted) <= len(spelled) - (len(raw) * 8 // 6 - 2) + len(MASK)


@given(st.lists(SECRETS, max_size=3), TEXTS)
def test_text_without_a_secret_is_unchanged(secrets: list[str], text: str) -> None:
    redactor = Redactor(secrets)
    redacted = redactor.redact_text(text)
    assert len(redacted) <= len(text)
    if MASK not in redacted:
        assert redacted == text
    assert NO_SECRETS.redact_text(text) == text


def test_longest_secret_is_redacted_first_and_overlaps_once() -> None:
    assert Redactor(["hunter", "hunter2"]).redact_text("hunter2 hunter3") == f"{MASK} {MASK}3"
    assert Redactor(["abcd", "cdef"]).redact_text("<abcdef>") == f"<{MASK}>"
    assert Redactor(["abcd"]).redact_text("abcdabcd") == MASK * 2
    assert Redactor(["abcabc"]).redact_text("abcabcabc") == MASK


def test_short_values_are_not_redacted() -> None:
    assert Redactor(["abc", ""]).redact_text("abc") == "abc"
    assert Redactor(["  ab \n"]).redact_text("ab") == "ab"


def test_secret_surrounded_by_spaces_is_redacted() -> None:
    assert Redactor(["hunter2\n"]).redact_text("hunter2!") == f"{MASK}!"


def test_lines_of_a_secret_are_redacted_one_by_one() -> None:
    secret = "-----BEGIN KEY-----\nAAAABBBBCCCC\nend\n"
    redactor = Redactor([secret])
    lines = [redactor.redact_text(line) for line in f"x\n{secret}y".splitlines()]
    assert lines == ["x", MASK, MASK, "end", "y"]
    assert redactor.redact_text(secret) == MASK


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


@given(SECRETS, json_values, TEXTS)
def test_secret_is_redacted_anywhere_in_a_value(secret: str, inner: Any, text: str) -> None:
    redactor = Redactor([secret])
    value = {"a": [text + secret, {secret: inner}], "b": {"c": json.dumps([secret])}, "d": inner}
    redacted = redactor.redact_value(value)
    assert not any(secret in item for item in texts_of(redacted))
    assert json.loads(redactor.redact_json(json.dumps(value)) or "") == json.loads(
        json.dumps(redacted)
    )
    assert NO_SECRETS.redact_value(value) is value


def test_number_that_contains_a_secret_is_redacted() -> None:
    redactor = Redactor(["123456"])
    assert redactor.redact_value([123456, 9123456.5, 12345, True]) == [MASK, MASK, 12345, True]
    assert redactor.redact_json(None) is None


@given(SECRETS, st.text("ab", max_size=300), st.integers(1, 50), st.sampled_from(sorted(SPELLINGS)))
def test_stream_is_split_between_secrets(secret: str, text: str, size: int, name: str) -> None:
    redactor = Redactor([secret])
    spelled = SPELLINGS[name](secret)
    stream = text[:150] + spelled + text[150:] + spelled
    reported, rest = [], ""
    for start in range(0, len(stream), size):
        rest += stream[start : start + size]
        position = redactor.safe_cut_position(rest)
        reported.append(redactor.redact_text(rest[:position]))
        rest = rest[position:]
    reported.append(redactor.redact_text(rest))
    assert spelled not in "".join(reported).replace(MASK, "*")
    assert "".join(reported).count(MASK) >= redactor.redact_text(stream).count(MASK)
    assert len("".join(reported)) <= len(stream)


@pytest.mark.parametrize("text", ["a line of no interest, line 000\n" * 32_000, "l" * 2**20])
def test_redaction_of_a_megabyte_is_fast(text: str) -> None:
    alike = [f"line 000000{number:02}: {'l' * number}" for number in range(100)]
    redactor = Redactor(["\n".join(alike), *alike])
    start = process_time()
    assert redactor.redact_text(text) == text
    assert process_time() - start < 5.0
