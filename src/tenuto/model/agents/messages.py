"""What may be said to an agent, and how it is stored."""

import re
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.redact import Redactor
from tenuto.model.tenancy.secrets import extract_secrets

MOST_WAITING = 10_000
"""Messages that wait for one agent at once."""
MAX_BODY = 64 * 1024
_KIND = re.compile(r"[a-z][a-z0-9._-]{0,63}")


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said. A coalescable one takes the place of those of its kind and scope."""

    kind: str
    body: Any = None
    scope_key: str | None = None
    coalescable: bool = False
    client_message_id: str | None = None


def message_row(
    made: UUID,
    workspace: UUID,
    agent: UUID,
    new: NewMessage,
    text: str,
    *,
    sender: str | None,
    task: UUID | None = None,
    attempt: int | None = None,
) -> tuple[Any, ...]:
    """A row for `messages_add`."""
    said = (new.kind, new.scope_key, new.coalescable, new.client_message_id, text)
    return (made, workspace, agent, *said, task, attempt, sender)


def body_text(new: NewMessage) -> str:
    """The body as it is stored; `Invalid` when nothing like it can be said."""
    if not _KIND.fullmatch(new.kind):
        text = "kind is 1 to 64 small letters, digits, '.', '_' or '-', the first of them a letter"
        raise Invalid(text, field="kind")
    bounds.text("scopeKey", new.scope_key or "", bounds.MAX_TITLE)
    if new.client_message_id is not None:
        bounds.text("clientMessageId", new.client_message_id, bounds.MAX_TITLE, empty=False)
    bounds.json_text("body", new.body)
    stored, values = extract_secrets(new.body)
    text = bounds.json_text("body", Redactor(values.values()).value(stored)) or "null"
    if len(text.encode()) > MAX_BODY:
        most = f"at most {MAX_BODY:,} bytes of JSON are accepted"
        raise Invalid(f"body is too large; {most}", "too_large", field="body")
    return text
