"""Messages to agents: their checks and their stored form."""

import re
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.redact import Redactor
from tenuto.model.tenancy.secrets import extract_secrets

MAX_WAITING = 10_000
"""Waiting messages per agent."""
MAX_BODY = 64 * 1024
_KIND = re.compile(r"[a-z][a-z0-9._-]{0,63}")


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message; if `coalescable`, it replaces waiting ones of the same kind and scope."""

    kind: str
    body: Any = None
    scope_key: str | None = None
    coalescable: bool = False
    client_message_id: str | None = None


def message_row(
    message_id: UUID,
    workspace: UUID,
    agent: UUID,
    new: NewMessage,
    text: str,
    *,
    sender: str | None,
    task: UUID | None = None,
    attempt: int | None = None,
) -> tuple[Any, ...]:
    """Returns the row of a message for the query `messages_add`."""
    content = (new.kind, new.scope_key, new.coalescable, new.client_message_id, text)
    return (message_id, workspace, agent, *content, task, attempt, sender)


def stored_body(new: NewMessage) -> str:
    """Checks a message (`Invalid`) and returns its body as JSON text with masked secrets."""
    if not _KIND.fullmatch(new.kind):
        text = (
            "kind must have 1 to 64 small letters, digits, '.', '_' or '-', and begin with a letter"
        )
        raise Invalid(text, field="kind")
    bounds.check_text("scopeKey", new.scope_key or "", bounds.MAX_TITLE)
    if new.client_message_id is not None:
        bounds.check_text("clientMessageId", new.client_message_id, bounds.MAX_TITLE, empty=False)
    bounds.to_json_text("body", new.body)
    stored, values = extract_secrets(new.body)
    text = bounds.to_json_text("body", Redactor(values.values()).redact_value(stored)) or "null"
    if len(text.encode()) > MAX_BODY:
        limit = f"at most {MAX_BODY:,} bytes of JSON are allowed"
        raise Invalid(f"body is too large; {limit}", "too_large", field="body")
    return text
