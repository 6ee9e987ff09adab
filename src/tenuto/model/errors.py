"""Every error that a caller can receive.

TenutoError
├── Invalid        the request can never be accepted
├── NotFound       the object does not exist in this workspace
├── Conflict       the present state does not allow the request; expected under concurrency
├── Unauthenticated the caller is unknown: no valid token or login
├── Forbidden      the caller has no permission
├── TooMany        too many requests, or a quota is reached; it may succeed later
├── Unavailable    the store or a service does not respond; the same call may succeed later
└── Incompatible   the versions of program and database do not fit

Each error has a stable `code` from `CODES`. Programs decide by the code; people read the message.
"""

from typing import Any, ClassVar

CODES: dict[str, str] = {
    "agent_draining": "The agent is draining and accepts no more tasks.",
    "agent_terminated": "The agent was terminated and accepts no more tasks.",
    "attempts_used_up": "The task has no attempts left.",
    "body_too_large": "The request body is larger than this server allows.",
    "budget_too_small": "The requested budget is already used up.",
    "bulk_too_large": "A bulk submit can have at most 10,000 tasks.",
    "cancel_requested": "The task is being cancelled: nothing more is accepted from its attempt.",
    "checkpoint_stale": "A checkpoint with a higher number is already stored.",
    "child_in_two_groups": "A task or group can be a child of one group only, and only once.",
    "corrupt": "The stored row cannot be read; the task was removed from the queue.",
    "database_invalid": "The database address is not supported.",
    "database_switching": "The database is switching to another server; try again soon.",
    "database_unreachable": "The database cannot be opened or does not respond.",
    "dependency_cycle": "The tasks or definitions depend on each other in a cycle.",
    "dependency_failed": "A dependency of the task failed.",
    "dependency_unknown": "A dependency of the task does not exist.",
    "escalation_required": "The agent must say why it failed and what to do next.",
    "expression_failed": "The expression has no value: a name is missing or types do not match.",
    "expression_invalid": "The expression cannot be parsed, or costs too many steps.",
    "folder_unsafe": "A folder that must be private belongs to another user or is open to others.",
    "forbidden": "The caller's role or token does not allow it.",
    "headers_too_large": "The request headers are larger, or more, than this server allows.",
    "idempotency_conflict": "The key was used before: for another request, or without a result.",
    "in_progress": "A request with the same idempotency key is still in progress.",
    "internal": "An internal error in this program.",
    "invalid_filter": "The filter has a field that cannot be filtered by.",
    "invalid_json": "The value is not valid JSON.",
    "invalid_request": "The request is not valid HTTP.",
    "invalid_value": "A field has a value outside its range.",
    "keys_invalid": "The encryption keys are missing, weak, malformed or readable by others.",
    "last_owner": "A workspace must have at least one owner.",
    "lease_lost": "The attempt no longer holds the lease of the task.",
    "login_refused": "The user name or the password is wrong.",
    "mailbox_full": "The agent has the maximum number of waiting messages.",
    "method_not_allowed": "The path does not support this method.",
    "name_taken": "The name is already in use.",
    "nesting_too_deep": "Groups are nested deeper than 64 levels.",
    "not_found": "Nothing with that id exists in this workspace.",
    "out_of_turn": "The command is not allowed in the present status.",
    "path_missing": "The path of a reference does not exist in the result.",
    "pause_requested": "The task is being paused; only a last checkpoint is accepted.",
    "payload_pruned": "The task's payload was deleted, by its age or by a user.",
    "pooler_unsuitable": "The pooler in front of the database cannot be used in transaction mode.",
    "port_taken": "The API cannot listen on its address.",
    "quota_exceeded": "The workspace has reached one of its quotas.",
    "rate_limited": "The token sends too many requests.",
    "reference_invalid": "A reference to a result is malformed or its task is no predecessor.",
    "request_timeout": "The request's headers or body did not arrive in time.",
    "result_missing": "A reference is to a task that has no result in this flow.",
    "schedule_invalid": "The schedule cannot be parsed, or has no times.",
    "schema_newer": "The database was upgraded by a newer, incompatible version of this program.",
    "schema_older": "The database schema is older than this program; migrate it.",
    "secret_forbidden": "This role, agent or definition may not use the secret.",
    "secret_in_definition": "A definition must not have secret values; refer to a stored secret.",
    "secret_unknown": "The workspace has no secret with that name.",
    "secret_unreadable": "An encrypted value was altered, or its key is not in the key ring.",
    "secrets_unavailable": "No encryption keys are configured: secrets cannot be stored or read.",
    "server_unreachable": "The server does not respond, or another program does in its place.",
    "signature_invalid": "The message is not signed with this secret, or not within five minutes.",
    "step_budget": "The flow has used all its jumps.",
    "step_conflict": "The step is already stored with another value.",
    "storage_full": "The disk or the database is full.",
    "target_unknown": "No definition has that key.",
    "text_invalid": "The text contains NUL or a lone surrogate, which no database can store.",
    "too_deep": "The JSON value is nested too deeply.",
    "too_large": "The value is larger than its limit.",
    "too_many_bytes": "Too many body bytes are in progress: of a token, workspace or in total.",
    "too_many_children": "The task has the maximum number of subtasks.",
    "too_many_connections": "The server or the client address has too many connections.",
    "too_many_lanes": "The workspace has too many distinct sets of task requirements.",
    "too_many_polls": "The token has the maximum number of waiting claims.",
    "too_many_streams": "The token or the workspace has the maximum number of live streams.",
    "too_many_values": "The body has more names and values than this server allows.",
    "too_many_webhooks": "The workspace has the maximum number of webhooks.",
    "too_many_workspaces": "The maximum number of workspaces was created from this workspace.",
    "tree_too_deep": "The task is at the maximum subtask depth and cannot create subtasks.",
    "unauthenticated": "The token is missing or not valid.",
    "unsupported_media_type": "The request body is not JSON.",
    "url_forbidden": "The URL leads to an address that this program must not connect to.",
    "url_invalid": "The URL cannot be parsed, or its host name cannot be resolved.",
    "version_conflict": "It was changed since it was read; read it again and repeat the change.",
    "webhook_disabled": "The webhook is disabled or deleted, so nothing is sent to it.",
    "wrong_database": "The database addresses lead to different databases; nothing was done.",
    "wrong_role": "A database connection has another role than required; nothing was done.",
    "yaml_invalid": "The YAML cannot be parsed.",
}


class TenutoError(Exception):
    """Base of all expected errors: responses to a caller, not bugs."""

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
    """The request can never be accepted."""

    default_code = "invalid_value"


class NotFound(TenutoError):
    """The object does not exist in this workspace."""

    default_code = "not_found"


class Conflict(TenutoError):
    """The present state does not allow the request."""

    default_code = "out_of_turn"


class Unauthenticated(TenutoError):
    """The caller is unknown: no valid token or login."""

    default_code = "unauthenticated"


class Forbidden(TenutoError):
    """The caller has no permission."""

    default_code = "forbidden"


class TooMany(TenutoError):
    """Too many requests, or a quota is reached; it may succeed after `retry_after` seconds."""

    default_code = "rate_limited"

    def __init__(self, message: str, code: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, code)
        self.retry_after = retry_after


class Unavailable(TenutoError):
    """The store or a service does not respond; the same call may succeed later."""

    default_code = "database_unreachable"


class Incompatible(TenutoError):
    """The versions of program and database do not fit."""

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


def status_for_error(table: dict[type[TenutoError], int], error: TenutoError) -> int:
    """Returns the status of the error's class in `HTTP_STATUS` or `EXIT_CODE`."""
    return table[type(error)]
