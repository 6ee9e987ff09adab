"""Secrets of a task: values under `secrets` in its input, and references to stored secrets."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.redact import MASK

KEY = "secrets"
_FIELD = f"input.{KEY}"
SECRETS_MARK = f'"{KEY}"'
"""Part of the JSON text of every input with own secrets."""
REFERENCE = "$secret"
REFERENCE_MARK = '"$'
"""Part of the JSON text of every reference: to a secret, and to the result of a task."""
_QUOTED_REFERENCE = f'"{REFERENCE}"'
_QUOTED_MASK = f'"{MASK}"'
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{bounds.MAX_NAME}}}")


class SecretReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{"$secret": NAME}`: is replaced by the value of a stored secret."""

    name: str = msgspec.field(name=REFERENCE)


def check_name(name: str) -> None:
    """Raises `Invalid` unless the name is valid for a secret."""
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"a secret name must have 1 to {bounds.MAX_NAME} letters, digits, '_', '.' or '-'",
            field="name",
        )


def check_value(field: str, value: str) -> None:
    """Raises `Invalid` unless the value can be stored; the message does not contain the value."""
    bounds.check_text(field, value, bounds.MAX_SECRET)
    if not value:
        raise Invalid(f"{field} must not be empty", field=field)
    for size, maximum, unit in (
        (len(value.encode()), bounds.MAX_SECRET, "bytes"),
        (len(value.splitlines()), bounds.MAX_SECRET_LINES, "lines"),
    ):
        if size > maximum:
            raise Invalid(f"{field} has more than {maximum:,} {unit}", "too_large", field=field)


def may_have_references(text: str | None) -> bool:
    """True if JSON text may refer to a stored secret; a cheap text search."""
    return text is not None and _QUOTED_REFERENCE in text


def may_have_secrets(text: str | None) -> bool:
    """True if stored JSON text may contain masks of secrets or references to secrets."""
    return text is not None and (_QUOTED_MASK in text or _QUOTED_REFERENCE in text)


def referenced_name(value: Any) -> str | None:
    """Returns the secret's name if the value is a reference, else `None`."""
    name = value.get(REFERENCE) if isinstance(value, dict) and len(value) == 1 else None
    return name if isinstance(name, str) else None


def referenced_names(value: Any) -> set[str]:
    """Returns the names of stored secrets that a JSON value refers to."""
    if (name := referenced_name(value)) is not None:
        return {name}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {name for item in items for name in referenced_names(item)}


def definition_secret_names(value: Any) -> set[str]:
    """Returns the secret names a definition's JSON refers to; `Invalid` for an invalid name.

    A name that only a flow would fill in is invalid, because its use cannot be checked.
    """
    names: set[str] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            if len(current) == 1 and REFERENCE in current:
                name = current[REFERENCE]
                if not isinstance(name, str) or not _NAME.fullmatch(name):
                    raise Invalid(
                        f'"{REFERENCE}" must be the name of a secret, not {str(name)[:100]!r}',
                        "secret_unknown",
                    )
                names.add(name)
            pending += current.values()
        elif isinstance(current, list | tuple):
            pending += current
    return names


def resolve_references(value: Any, secrets: Mapping[str, str]) -> Any:
    """Returns the JSON value with each reference replaced by its secret.

    `secrets` must contain every referenced name.
    """
    if (name := referenced_name(value)) is not None:
        return secrets[name]
    if isinstance(value, dict):
        return {key: resolve_references(item, secrets) for key, item in value.items()}
    return (
        [resolve_references(item, secrets) for item in value] if isinstance(value, list) else value
    )


def has_secrets(value: Any) -> bool:
    """True if a task's input has the field `secrets`."""
    return isinstance(value, dict) and KEY in value


def extract_secrets(value: Any) -> tuple[Any, dict[str, str]]:
    """Returns the input, the values of its field `secrets` masked, and these values by name."""
    if not has_secrets(value):
        return value, {}
    bounds.to_json_text("input", value)
    secrets = value[KEY]
    if not isinstance(secrets, dict) or not all(isinstance(v, str) for v in secrets.values()):
        raise Invalid(f"{_FIELD} must be an object of texts", field=_FIELD)
    if len(secrets) > bounds.MAX_SECRETS:
        reason = f"more than {bounds.MAX_SECRETS} entries"
        raise Invalid(f"{_FIELD} has {reason}", "too_large", field=_FIELD)
    for name, secret in secrets.items():
        bounds.check_text(_FIELD, name, bounds.MAX_NAME, empty=False)
        check_value(_FIELD, secret)
        if secret == MASK:
            raise Invalid(f"{_FIELD} must not have the value {MASK}, the mask", field=_FIELD)
    return restore_secrets(value, dict.fromkeys(secrets, MASK)), secrets


def restore_secrets(value: Any, secrets: Mapping[str, str]) -> Any:
    """Returns a task's input with these values under `secrets`; unchanged if there are none."""
    return {**value, KEY: dict(secrets)} if secrets and isinstance(value, dict) else value
