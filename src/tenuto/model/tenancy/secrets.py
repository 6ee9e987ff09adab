"""What of a task is secret: values under `secrets` in its input, and names of stored secrets."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.redact import MASK

KEY = "secrets"
_FIELD = f"input.{KEY}"
REFERENCE = "$secret"
_REFERS = f'"{REFERENCE}"'
_MASKS = f'"{MASK}"'
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{bounds.MAX_NAME}}}")


class SecretReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{"$secret": NAME}`: the value of a stored secret, wherever it stands."""

    name: str = msgspec.field(name=REFERENCE)


def check_name(name: str) -> None:
    """Raise `Invalid` unless a secret may have the name."""
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"a secret's name has 1 to {bounds.MAX_NAME} letters, digits, '_', '.' or '-'",
            field="name",
        )


def check_value(field: str, value: str) -> None:
    """Raise `Invalid` unless the value can be kept; the message does not repeat it."""
    bounds.text(field, value, bounds.MAX_SECRET)
    if not value:
        raise Invalid(f"{field} must not be empty", field=field)
    for n, most, unit in (
        (len(value.encode()), bounds.MAX_SECRET, "bytes"),
        (len(value.splitlines()), bounds.MAX_SECRET_LINES, "lines"),
    ):
        if n > most:
            raise Invalid(f"{field} has more than {most:,} {unit}", "too_large", field=field)


def refers(text: str | None) -> bool:
    """Whether JSON text may name a stored secret: a glance that costs nothing."""
    return text is not None and _REFERS in text


def may_have_secrets(text: str | None) -> bool:
    """Whether an attempt may have to be handed more than the stored JSON text says."""
    return text is not None and (_MASKS in text or _REFERS in text)


def referred(value: Any) -> str | None:
    """The name in a value that is a reference, else nothing."""
    name = value.get(REFERENCE) if isinstance(value, dict) and len(value) == 1 else None
    return name if isinstance(name, str) else None


def references(value: Any) -> set[str]:
    """The names of stored secrets that a JSON value refers to."""
    if (name := referred(value)) is not None:
        return {name}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {name for item in items for name in references(item)}


def named(value: Any) -> set[str]:
    """The names of stored secrets that a definition's JSON value refers to.

    Raises `Invalid` for a name that only a flow would fill in: nobody could say whose it is.
    """
    found: set[str] = set()
    todo = [value]
    while todo:
        here = todo.pop()
        if isinstance(here, dict):
            if len(here) == 1 and REFERENCE in here:
                name = here[REFERENCE]
                if not isinstance(name, str) or not _NAME.fullmatch(name):
                    raise Invalid(
                        f'"{REFERENCE}" wants the name of a secret, not {str(name)[:100]!r}',
                        "secret_unknown",
                    )
                found.add(name)
            todo += here.values()
        elif isinstance(here, list | tuple):
            todo += here
    return found


def resolved(value: Any, named: Mapping[str, str]) -> Any:
    """The JSON value with the secrets themselves instead of references; all must be named."""
    if (name := referred(value)) is not None:
        return named[name]
    if isinstance(value, dict):
        return {key: resolved(item, named) for key, item in value.items()}
    return [resolved(item, named) for item in value] if isinstance(value, list) else value


def has_secrets(value: Any) -> bool:
    """Whether a task's input keeps something secret."""
    return isinstance(value, dict) and KEY in value


def extract_secrets(value: Any) -> tuple[Any, dict[str, str]]:
    """A task's input as it may be stored, and the values that it keeps secret."""
    if not has_secrets(value):
        return value, {}
    bounds.json_text("input", value)
    secrets = value[KEY]
    if not isinstance(secrets, dict) or not all(isinstance(v, str) for v in secrets.values()):
        raise Invalid(f"{_FIELD} must be an object of texts", field=_FIELD)
    if len(secrets) > bounds.MAX_SECRETS:
        most = f"more than {bounds.MAX_SECRETS} entries"
        raise Invalid(f"{_FIELD} has {most}", "too_large", field=_FIELD)
    for name, secret in secrets.items():
        bounds.text(_FIELD, name, bounds.MAX_NAME, empty=False)
        check_value(_FIELD, secret)
        if secret == MASK:
            raise Invalid(f"{_FIELD} has {MASK}, which stands for a value, as one", field=_FIELD)
    return restore_secrets(value, dict.fromkeys(secrets, MASK)), secrets


def restore_secrets(value: Any, secrets: Mapping[str, str]) -> Any:
    """A task's input with these values under `secrets`."""
    return {**value, KEY: dict(secrets)} if secrets and isinstance(value, dict) else value
