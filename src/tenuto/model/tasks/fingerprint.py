"""Fingerprints: what tells a repeated submit from another one that uses the same key or id.

Only what differs from the defaults is in one, so that a field which a later version adds changes
nothing for callers who do not use it.
"""

import hashlib
from functools import cache
from typing import Any

import msgspec

from tenuto.model import bounds
from tenuto.model.tasks.submission import NewTask

_FIELDS_OF_01 = (
    "title id description prompt system_prompt model max_turns conversation task_type"
    " agent_type target_agent runtime command cwd env priority tags task_tags capabilities"
    " container region estimate_minutes max_attempts retry timeout_s queue_ttl_s lease_s"
    " run_at parent input metadata idempotency_key trace_id source key depends_on blocks"
    " on_dependency_failure next group control complexity escalation concurrency budget"
).split()
_TaskOf01: Any = msgspec.defstruct("_TaskOf01", [(name, Any) for name in _FIELDS_OF_01])


def fingerprint(new: NewTask, secret: str = "") -> str:
    """A hash of what the caller asked for beyond the defaults.

    `secret` stands for what the task keeps secret, which is not in it.
    """
    for field in ("input", "metadata"):
        bounds.json_text(field, getattr(new, field))
    return _hash(_said(_as_read(msgspec.structs.replace(new, id=None))), secret)


def _as_read(new: NewTask) -> NewTask:
    """The task as it is read from JSON: a program may give 7 where a number is stored as 7.0."""
    return msgspec.json.decode(msgspec.json.encode(new), type=type(new))


def fingerprints(new: NewTask, secret: str = "") -> tuple[str, ...]:
    """Every hash by which a task may be known: today's, which is stored, and that of 0.1.

    Tasks submitted by 0.1 keep its hash, so repeats of them are known by it. It goes with 0.3. A
    task that uses a field which 0.1 did not know repeats none of them.
    """
    if not _said(new).keys() <= set(_FIELDS_OF_01):
        return (fingerprint(new, secret),)
    told = {name: getattr(new, name) for name in _FIELDS_OF_01} | {"id": None}
    return fingerprint(new, secret), _hash(_TaskOf01(**told), secret)


def _hash(sent: Any, secret: str) -> str:
    encoded = msgspec.json.encode(sent, order="deterministic")
    return hashlib.blake2b(encoded + secret.encode(), digest_size=16).hexdigest()


def _said(value: Any) -> Any:
    """The value as JSON may tell it: of a struct what differs from its defaults, and its kind."""
    if not isinstance(value, msgspec.Struct):
        return value
    defaults = _defaults(type(value))
    given = {name: getattr(value, name) for name in value.__struct_fields__}
    said = {name: _said(each) for name, each in given.items() if not _same(each, defaults[name])}
    kind = value.__struct_config__.tag
    return said if kind is None else {"(kind)": kind, **said}


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: _default(field) for field in msgspec.structs.fields(kind)}


def _default(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _same(value: Any, default: Any) -> bool:
    """Whether a value is the default, as read from JSON, where a tuple is a list."""
    if isinstance(value, list) and isinstance(default, tuple):
        return tuple(value) == default
    return bool(value == default)
