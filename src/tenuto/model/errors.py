"""Every error a caller can meet.

TenutoError
├── Invalid        what was sent can never be accepted
├── NotFound       no such thing in this workspace
├── Conflict       the state of things does not allow it now; expected under concurrency
├── Unauthenticated nobody knows who asks
├── Forbidden      the caller may not
├── TooMany        the caller asks too often, or has too much; later it may succeed
├── Unavailable    the store or a service cannot answer; the same call may succeed later
└── Incompatible   program and database do not fit each other

Each error carries a stable `code` from `CODES`; callers decide by code, people read the message.
"""

from typing import Any, ClassVar

CODES: dict[str, str] = {
    "agent_draining": "The agent is to end and takes no more tasks.",
    "agent_terminated": "The agent was terminated and takes no more tasks.",
    "attempts_used_up": "The task has no tries left.",
    "body_too_large": "The request's body is larger than this server accepts.",
    "budget_too_small": "The budget is used up already.",
    "bulk_too_large": "A bulk submit holds at most 10,000 tasks.",
    "cancel_requested": "The task is being cancelled; nothing more is accepted from its attempt.",
    "checkpoint_stale": "A checkpoint with a higher number is already stored.",
    "child_in_two_groups": "A child belongs to at most one group, and stands in it once.",
    "corrupt": "The stored row cannot be read; it was taken out of the queue.",
    "database_invalid": "The database address is not one this program understands.",
    "database_switching": "The database changes its server at this moment; try again soon.",
    "database_unreachable": "The database cannot be opened or does not answer.",
    "dependency_cycle": "The tasks would wait for each other in a circle.",
    "dependency_failed": "Something that the task waits for failed.",
    "dependency_unknown": "The task that is to be waited for does not exist.",
    "escalation_required": "The agent must say why it failed, and what is to be done.",
    "expression_failed": "The expression has no answer: a name is missing or types do not fit.",
    "expression_invalid": "The expression cannot be understood, or is too costly.",
    "folder_unsafe": "A folder that must be private is somebody else's, or open to others.",
    "forbidden": "The caller's role or token does not allow it.",
    "headers_too_large": "The request's headers are larger, or more, than this server accepts.",
    "idempotency_conflict": "The key was used before: with other content, or without an answer.",
    "in_progress": "A request with the same idempotency key is still being answered.",
    "internal": "A fault in this program.",
    "invalid_filter": "The filter names something that cannot be filtered by.",
    "invalid_json": "The value is not JSON this system accepts.",
    "invalid_request": "What was sent is no HTTP request.",
    "invalid_value": "A field has a value outside its range.",
    "keys_invalid": "The keys that seal secrets are missing, weak, malformed or open to others.",
    "last_owner": "A workspace keeps at least one owner.",
    "lease_lost": "The attempt no longer owns the task.",
    "login_refused": "The name or the password is wrong.",
    "mailbox_full": "As many messages wait for the agent as may.",
    "method_not_allowed": "The path knows other methods.",
    "name_taken": "Something of that name exists already.",
    "nesting_too_deep": "Groups are nested deeper than 64.",
    "not_found": "Nothing with that id exists in this workspace.",
    "out_of_turn": "The command does not fit the task's present status.",
    "path_missing": "A reference leads to something that the result does not have.",
    "pause_requested": "The task is being paused; only a last checkpoint is accepted.",
    "payload_pruned": "What the task asked for is gone, by its age or because it was deleted.",
    "pooler_unsuitable": "The pooler before the database cannot be used in transaction mode.",
    "port_taken": "The API cannot listen where it was told to.",
    "quota_exceeded": "The workspace has reached one of its quotas.",
    "rate_limited": "The token asks too often.",
    "reference_invalid": "A reference to a result is malformed or refers to no predecessor.",
    "request_timeout": "The request's headers or body did not arrive in time.",
    "result_missing": "A reference is to a task that made no result in this flow.",
    "schedule_invalid": "The schedule cannot be understood, or never comes due.",
    "schema_newer": "The database was upgraded by a newer, incompatible program.",
    "schema_older": "The database has not been migrated to what this program needs.",
    "secret_forbidden": "The secret is not for this role, agent or definition.",
    "secret_in_definition": "A definition is stored as written; it names secrets.",
    "secret_unknown": "The workspace has no secret of that name.",
    "secret_unreadable": "What is sealed was altered, or its key is not in this program's ring.",
    "secrets_unavailable": "This program has no keys: it can neither seal secrets nor open them.",
    "server_unreachable": "The server does not answer, or something else answers in its place.",
    "signature_invalid": "The message was not signed with this secret, or not within five minutes.",
    "step_budget": "The flow has made all the jumps that it may.",
    "step_conflict": "The step is already recorded with another value.",
    "storage_full": "The disk or the database has no room left.",
    "target_unknown": "Nothing with that key is defined.",
    "text_invalid": "Text holds NUL or half a surrogate pair, which no database can keep.",
    "too_deep": "The JSON value is nested too deep.",
    "too_large": "The value is larger than its limit.",
    "too_many_bytes": "Large bodies are in progress, of the token, the workspace or all together.",
    "too_many_children": "The task has as many children as it may have.",
    "too_many_connections": "The server or the client's address has as many connections as it may.",
    "too_many_lanes": "The workspace has too many distinct sets of task requirements.",
    "too_many_polls": "The token has as many claims waiting as it may have.",
    "too_many_streams": "The token or the workspace has as many live streams as it may have.",
    "too_many_values": "The body has more names and elements than this server accepts.",
    "too_many_webhooks": "The workspace has as many webhooks as it may have.",
    "too_many_workspaces": "As many workspaces were made from here as may be.",
    "tree_too_deep": "The task stands too deep below the first of its tree to make more.",
    "unauthenticated": "No token, or one that does not hold.",
    "unsupported_media_type": "The body is not JSON.",
    "url_forbidden": "The URL leads where this program must not connect to.",
    "url_invalid": "The URL cannot be understood, or its host cannot be found.",
    "version_conflict": "Somebody changed it since it was read; read it again.",
    "webhook_disabled": "The webhook is disabled or gone, so nothing is sent to it.",
    "wrong_database": "The database's addresses lead to different databases, so nothing is done.",
    "wrong_role": "A database connection acts in another role than it must, so nothing is done.",
    "yaml_invalid": "The YAML cannot be understood.",
}


class TenutoError(Exception):
    """Base of all errors that are answers rather than bugs."""

    default_code: ClassVar[str] = "internal"

    def __init__(self, message: str, code: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.details = details
        assert self.code in CODES, f"undocumented error code {self.code!r}"

    def __str__(self) -> str:
        return self.message


class Invalid(TenutoError):
    """What was sent can never be accepted."""

    default_code = "invalid_value"


class NotFound(TenutoError):
    """No such thing in this workspace."""

    default_code = "not_found"


class Conflict(TenutoError):
    """The state of things does not allow it now."""

    default_code = "out_of_turn"


class Unauthenticated(TenutoError):
    """Nobody knows who asks."""

    default_code = "unauthenticated"


class Forbidden(TenutoError):
    """The caller may not."""

    default_code = "forbidden"


class TooMany(TenutoError):
    """The caller asks too often, or has too much; `retry_after` seconds from now it may succeed."""

    default_code = "rate_limited"

    def __init__(self, message: str, code: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, code)
        self.retry_after = retry_after


class Unavailable(TenutoError):
    """The store or a service cannot answer; the same call may succeed later."""

    default_code = "database_unreachable"


class Incompatible(TenutoError):
    """Program and database do not fit each other."""

    default_code = "schema_newer"


HTTP_STATUS: dict[type[TenutoError], int] = {
    Invalid: 422,
    NotFound: 404,
    Conflict: 409,
    Unauthenticated: 401,
    Forbidden: 403,
    TooMany: 429,
    Unavailable: 503,
    Incompatible: 503,
}

EXIT_CODE: dict[type[TenutoError], int] = {
    Invalid: 2,
    NotFound: 1,
    Conflict: 1,
    Unauthenticated: 1,
    Forbidden: 1,
    TooMany: 1,
    Unavailable: 3,
    Incompatible: 3,
}


def lookup(table: dict[type[TenutoError], int], error: TenutoError) -> int:
    """The entry of the error's own class in the tree."""
    return table[type(error)]
