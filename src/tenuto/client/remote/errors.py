"""A server's refusals as the exceptions that the engine itself would raise."""

from typing import Any

import httpx2
import msgspec

from tenuto.model.errors import (
    CODES,
    Conflict,
    Forbidden,
    Incompatible,
    Invalid,
    NotFound,
    TenutoError,
    TooMany,
    Unauthenticated,
    Unavailable,
)

KINDS: dict[int, type[TenutoError]] = {
    400: Invalid,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: Invalid,
    408: Invalid,
    409: Conflict,
    412: Conflict,
    413: Invalid,
    415: Invalid,
    422: Invalid,
    429: TooMany,
    431: Invalid,
    503: Unavailable,
}
CODED: dict[str, type[TenutoError]] = {"schema_newer": Incompatible, "schema_older": Incompatible}
"""Codes whose class the status does not tell."""
PASSING = frozenset({429, 502, 503, 504})
"""Statuses after which the same request may succeed."""
LONGEST_SAID = 300


class ServerError(Exception):
    """A fault in the server's program; asking again changes nothing."""


class _Problem(msgspec.Struct):
    code: str
    detail: str
    field: str | None = None


def error_from_response(answer: httpx2.Response) -> Exception:
    """The exception that an answer other than a success stands for."""
    problem = _read(answer)
    status = answer.status_code
    if problem is None or (status not in KINDS and status < 500):
        return _foreign(answer)
    if status == 500:
        return ServerError(f"{problem.detail} ({problem.code})")
    kind = CODED.get(problem.code, KINDS.get(status, Unavailable))
    code = problem.code if problem.code in CODES else kind.default_code
    if issubclass(kind, TooMany):
        return TooMany(problem.detail, code, retry_after=retry_after(answer) or 1.0)
    details: dict[str, Any] = {} if problem.field is None else {"field": problem.field}
    return kind(problem.detail, code, **details)


def is_retryable(answer: httpx2.Response, failure: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(failure, Conflict):
        return failure.code == "in_progress"
    return answer.status_code in PASSING and isinstance(failure, Unavailable | TooMany)


def _read(answer: httpx2.Response) -> _Problem | None:
    if not answer.headers.get("content-type", "").startswith("application/problem+json"):
        return None
    try:
        return msgspec.json.decode(answer.content, type=_Problem)
    except msgspec.MsgspecError:
        return None


def _foreign(answer: httpx2.Response) -> TenutoError:
    """Whoever answered is not our server: a proxy, or a wrong address."""
    if answer.status_code == 413:
        size = len(answer.request.content)
        return Invalid(f"a proxy refuses a request of {size:,} bytes", "too_large")
    where = answer.request.url.copy_with(path="/", query=None)
    return Unavailable(
        f"{where} answers HTTP {answer.status_code}, not as a Tenuto server would",
        "server_unreachable",
    )


def retry_after(answer: httpx2.Response) -> float | None:
    """Seconds that the server asks to wait."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else None


def unreachable(url: str, error: Exception) -> Unavailable:
    """No answer came."""
    said = str(error)[:LONGEST_SAID] or type(error).__name__
    return Unavailable(f"no answer from {url}: {said}", "server_unreachable")
