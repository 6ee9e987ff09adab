"""Fingerprints: hashes that tell a repeated submit from another submit with the same key or id.

A fingerprint covers only the fields that differ from their defaults. A field that a later version
adds therefore changes no fingerprint of a caller who does not use it.
"""

import hashlib
from functools import cache
from typing import Any

import msgspec

from tenuto.model import bounds
from tenuto.model.tasks.submission import NewTask

_FIELDS_V0_1 = (
    "title id description prompt system_prompt model max_turns conversation task_type"
    " agent_type target_agent runtime command cwd env priority tags task_tags capabilities"
    " container region estimate_minutes max_attempts retry timeout_s queue_ttl_s lease_s"
    " run_at parent input metadata idempotency_key trace_id source key depends_on blocks"
    " on_dependency_failure next group control complexity escalation concurrency budget"
).split()
_TaskV0_1: Any = msgspec.defstruct("_TaskOf01", [(name, Any) for name in _FIELDS_V0_1])


def fingerprint(new: NewTask, secret: str = "") -> str:
    """Returns a hash of the fields of `new`, except `id`, that differ from their defaults.

    `secret` represents the task's secret values, which `new` does not contain.
    """
    for field in ("input", "metadata"):
        bounds.to_json_text(field, getattr(new, field))
    return _hash(_without_defaults(_json_round_trip(msgspec.structs.replace(new, id=None))), secret)


def _json_round_trip(new: NewTask) -> NewTask:
    """Returns the task as read back from JSON: a program may pass 7 where 7.0 is stored."""
    return msgspec.json.decode(msgspec.json.encode(new), type=type(new))


def fingerprints(new: NewTask, secret: str = "") -> tuple[str, ...]:
    """Returns the hashes that recognise a repeat: the stored one first, then that of version 0.1.

    Tasks submitted by version 0.1 keep its hash, so repeats of them are recognised by it. Version
    0.3 removes it. A task with a field that 0.1 did not have cannot repeat a task of 0.1.
    """
    if not _without_defaults(new).keys() <= set(_FIELDS_V0_1):
        return (fingerprint(new, secret),)
    values = {name: getattr(new, name) for name in _FIELDS_V0_1} | {"id": None}
    return fingerprint(new, secret), _hash(_TaskV0_1(**values), secret)


def _hash(value: Any, secret: str) -> str:
    """Returns the hash of a JSON value and of a text that represents the task's secrets."""
    encoded = msgspec.json.encode(value, order="deterministic")
    return hashlib.blake2b(encoded + secret.encode(), digest_size=16).hexdigest()


def _without_defaults(value: Any) -> Any:
    """Returns the value for JSON; of a struct only its kind and changed fields."""
    if not isinstance(value, msgspec.Struct):
        return value
    defaults = _default_values(type(value))
    values = {name: getattr(value, name) for name in value.__struct_fields__}
    changed = {
        name: _without_defaults(item)
        for name, item in values.items()
        if not _is_default(item, defaults[name])
    }
    kind = value.__struct_config__.tag
    return changed if kind is None else {"(kind)": kind, **changed}


@cache
def _default_values(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: _default_value(field) for field in msgspec.structs.fields(kind)}


def _default_value(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _is_default(value: Any, default: Any) -> bool:
    """True if the value equals the default; JSON turns a tuple into a list."""
    if isinstance(value, list) and isinstance(default, tuple):
        return tuple(value) == default
    return bool(value == default)
