"""Limits on every input, and the functions that check them."""

import math
from datetime import datetime
from typing import Any

import msgspec

from tenuto.model.errors import Invalid

MAX_TITLE = 255
MAX_NAME = 100
MAX_TEXT = 1024 * 1024
MAX_JSON = 1024 * 1024
MAX_DEPTH = 64
MAX_ATTEMPTS = 1_000
MAX_TAGS = 50
MAX_BULK = 10_000
MAX_LANES = 10_000
MAX_ERROR = 4_000
MAX_STACK = 32_000
MAX_SECONDS = 10 * 365 * 24 * 3600
MAX_PAGE = 1_000
MAX_CLAIM = 10_000
MAX_LEASE_S = 30 * 24 * 3600
MAX_COUNT = 2**53
MAX_SECRET = 64 * 1024
MAX_SECRET_LINES = 1_000
MAX_SECRETS = 100
MAX_NAMED_SECRETS = 1_000
MAX_DEPENDENCIES = 10_000


def check_text(field: str, value: str, max_length: int, *, empty: bool = True) -> str:
    """Returns the text; raises `Invalid` if it is too long, empty or cannot be stored."""
    if not empty and not value.strip():
        raise Invalid(f"{field} must not be empty", field=field)
    if len(value) > max_length:
        raise Invalid(
            f"{field} is {len(value):,} characters long; at most {max_length:,} are allowed",
            "too_large",
            field=field,
        )
    if not is_storable(value):
        raise Invalid(
            f"{field} holds a NUL or a lone surrogate character", "text_invalid", field=field
        )
    return value


def is_storable(value: str) -> bool:
    """True if every database can store the text: no NUL and no lone surrogate."""
    if value.isascii():
        return "\x00" not in value
    return "\x00" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def make_storable(value: str, max_length: int) -> str:
    """Returns a program's output as storable text: bad characters replaced, a long end cut off."""
    if not is_storable(value):
        value = value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
    return value if len(value) <= max_length else value[: max_length - 1] + "…"


def check_number(field: str, value: float, minimum: float, maximum: float) -> None:
    """Raises `Invalid` unless the number is within the limits."""
    if not minimum <= value <= maximum:
        raise Invalid(
            f"{field} must be between {minimum:,} and {maximum:,}, not {value:,}", field=field
        )


def check_whole(field: str, value: int, minimum: int, maximum: int) -> None:
    """Raises `Invalid` unless the value is a whole number within the limits."""
    if type(value) is not int:  # a bool is not accepted
        raise Invalid(f"{field} must be a whole number", field=field)
    if not minimum <= value <= maximum:
        check_number(field, value, minimum, maximum)


def check_instant(field: str, value: datetime | None) -> None:
    """Raises `Invalid` if the value is no `None`, and has no time zone or a year out of range."""
    if value is None:
        return
    if value.tzinfo is None:
        raise Invalid(f"{field} needs a time zone", field=field)
    check_number(f"the year of {field}", value.year, 1970, 9000)


def to_json_text(field: str, value: Any) -> str | None:
    """Returns the value as JSON text, `None` for `None`; raises `Invalid` if it cannot be stored.

    It cannot be stored if it is not JSON, too large, nested too deep, or has text that no database
    can store.
    """
    if value is None:
        return None
    _check_json(field, value, 0)
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError) as error:
        raise Invalid(f"{field} is not JSON: {error}", "invalid_json", field=field) from error
    if len(encoded) > MAX_JSON:
        raise Invalid(
            f"{field} is {len(encoded):,} bytes of JSON; at most {MAX_JSON:,} are allowed",
            "too_large",
            field=field,
        )
    return encoded.decode()


def parse_json(field: str, source: str | bytes) -> Any:
    """Returns the value of untrusted JSON text; raises `Invalid` if it cannot be parsed."""
    try:
        return msgspec.json.decode(source)
    except RecursionError as error:
        raise Invalid(f"{field} is nested too deep", "too_deep", field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Invalid(f"{field} is not JSON: {error}", "invalid_json", field=field) from error


def _check_json(field: str, value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Invalid(f"{field} is nested deeper than {MAX_DEPTH}", "too_deep", field=field)
    if isinstance(value, str):
        if not is_storable(value):
            raise Invalid(
                f"{field} holds a NUL or a lone surrogate character", "text_invalid", field=field
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise Invalid(f"{field} has a key that is not text", "invalid_json", field=field)
            _check_json(field, key, depth)
            _check_json(field, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_json(field, item, depth + 1)
    else:
        _check_scalar(field, value)


def _check_scalar(field: str, value: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise Invalid(f"{field} holds an integer beyond 64 bits", "invalid_json", field=field)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Invalid(f"{field} holds a number that is not finite", "invalid_json", field=field)
    else:
        kind = type(value).__name__
        raise Invalid(f"{field} holds a {kind}, which is not JSON", "invalid_json", field=field)
