"""Errors as RFC 9457 problem details. A client gets a code and a sentence, never a stack trace."""

import logging
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
    SerializationException,
    ValidationException,
)

from tenuto.model.errors import HTTP_STATUS, Invalid, TenutoError, TooMany, status_for_error

log = logging.getLogger("tenuto.api")

MEDIA_TYPE = "application/problem+json"
INTERNAL_ERROR = 500
_TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Request timeout",
    409: "Conflict",
    412: "Precondition failed",
    413: "Content too large",
    415: "Unsupported media type",
    422: "Unprocessable content",
    429: "Too many requests",
    431: "Request header fields too large",
    500: "Internal error",
    503: "Unavailable",
}
_STATUS_OF_CODE = {
    "invalid_request": 400,
    "request_timeout": 408,
    "version_conflict": 412,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "headers_too_large": 431,
}
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error. Programs should branch on `code`."""

    title: str
    status: int
    code: str
    detail: str
    field: str | None = None
    type: str = "about:blank"


def problem_of(error: Exception) -> tuple[Problem, dict[str, str]]:
    """Returns problem details and headers for an exception; logs it if it is an internal error."""
    if isinstance(error, TenutoError):
        status = _STATUS_OF_CODE.get(error.code, status_for_error(HTTP_STATUS, error))
        headers = {}
        if isinstance(error, TooMany):
            headers["Retry-After"] = str(max(1, round(error.retry_after)))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return _problem(status, error.code, error.message, error.details.get("field")), headers
    if isinstance(error, ValidationException | SerializationException):
        return _problem(422, "invalid_value", *_validation_message(error)), {}
    if isinstance(error, NotFoundException):
        return _problem(404, "not_found", "unknown path"), {}
    if isinstance(error, HTTPException) and error.status_code < INTERNAL_ERROR:
        if error.status_code == 400:
            return _problem(422, "invalid_json", str(error.__cause__ or error.detail)[:300]), {}
        code = _CODE_OF_STATUS.get(error.status_code, "invalid_value")
        headers = dict(error.headers or {})
        if isinstance(error, MethodNotAllowedException):
            headers.setdefault("Allow", "GET")
        return _problem(error.status_code, code, str(error.detail)[:300]), headers
    log.error("internal error in a request", exc_info=error)
    return _problem(INTERNAL_ERROR, "internal", "internal error; see the server log"), {}


def _problem(status: int, code: str, detail: str, field: str | None = None) -> Problem:
    """Returns the problem details with the title of the status."""
    return Problem(_TITLES.get(status, "Error"), status, code, detail, field)


def _validation_message(
    error: ValidationException | SerializationException,
) -> tuple[str, str | None]:
    """Returns message and field (`None`: unknown) of a validation error of the framework."""
    extra: Any = getattr(error, "extra", None)
    if isinstance(extra, list) and extra and isinstance(extra[0], dict):
        first = extra[0]
        return str(first.get("message", error))[:300], first.get("key")
    cause = error.__cause__
    return str(cause if isinstance(cause, msgspec.MsgspecError) else error)[:300], None


def problem_response(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """Returns the error response for an exception; logs it if it is an internal error."""
    del request
    problem, headers = problem_of(error)
    return Response(problem, status_code=problem.status, headers=headers, media_type=MEDIA_TYPE)


def query_error(name: str, reason: str) -> Invalid:
    """Returns the error for a query parameter with an invalid value."""
    return Invalid(f"{name} {reason}", field=name)
