"""Maps error responses of a server to the exceptions that the engine would raise."""

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

ERROR_CLASS_BY_STATUS: dict[int, type[TenutoError]] = {
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
ERROR_CLASS_BY_CODE: dict[str, type[TenutoError]] = {
    "schema_newer": Incompatible,
    "schema_older": Incompatible,
}
"""Classes of codes for which the HTTP status is not enough."""
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
"""Statuses after which the same request may succeed."""
MAX_ERROR_TEXT = 300


class ServerError(Exception):
    """An internal error in the server (HTTP 500). Retrying does not help."""


class _Problem(msgspec.Struct):
    code: str
    detail: str
    field: str | None = None


def error_from_response(response: httpx2.Response) -> Exception:
    """Returns the exception for an unsuccessful response."""
    problem = _parse_problem(response)
    status = response.status_code
    if problem is None or (status not in ERROR_CLASS_BY_STATUS and status < 500):
        return _unexpected_response_error(response)
    if status == 500:
        return ServerError(f"{problem.detail} ({problem.code})")
    error_class = ERROR_CLASS_BY_CODE.get(
        problem.code, ERROR_CLASS_BY_STATUS.get(status, Unavailable)
    )
    code = problem.code if problem.code in CODES else error_class.default_code
    if issubclass(error_class, TooMany):
        return TooMany(problem.detail, code, retry_after=retry_after_s(response) or 1.0)
    details: dict[str, Any] = {} if problem.field is None else {"field": problem.field}
    return error_class(problem.detail, code, **details)


def is_retryable(response: httpx2.Response, failure: Exception) -> bool:
    """True if the same request may succeed later."""
    if isinstance(failure, Conflict):
        return failure.code == "in_progress"
    return response.status_code in RETRYABLE_STATUSES and isinstance(failure, Unavailable | TooMany)


def _parse_problem(response: httpx2.Response) -> _Problem | None:
    """Returns the problem+json body, or `None` if the response has none."""
    if not response.headers.get("content-type", "").startswith("application/problem+json"):
        return None
    try:
        return msgspec.json.decode(response.content, type=_Problem)
    except msgspec.MsgspecError:
        return None


def _unexpected_response_error(response: httpx2.Response) -> TenutoError:
    """Returns the error for a response that is not from a Tenuto server.

    It comes from a proxy, or the URL is wrong.
    """
    if response.status_code == 413:
        size = len(response.request.content)
        return Invalid(
            f"a proxy rejected the request: its {size:,} bytes exceed the proxy's limit",
            "too_large",
        )
    url = response.request.url.copy_with(path="/", query=None)
    return Unavailable(
        f"{url} returned HTTP {response.status_code}, which is not a response of a Tenuto server;"
        " check the URL",
        "server_unreachable",
    )


def retry_after_s(response: httpx2.Response) -> float | None:
    """Returns the seconds of the Retry-After header; `None` if it is missing or not a number."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else None


def unreachable_error(url: str, error: Exception) -> Unavailable:
    """Returns the error for a request without a response."""
    text = str(error)[:MAX_ERROR_TEXT] or type(error).__name__
    return Unavailable(f"no response from {url}: {text}", "server_unreachable")
