"""Errors of a server become the exceptions that the engine itself would raise."""

import httpx2
import msgspec
import pytest

from tenuto.api.edge import problems
from tenuto.client.remote.errors import (
    ERROR_CLASS_BY_STATUS,
    ServerError,
    error_from_response,
    is_retryable,
)
from tenuto.model.errors import (
    CODES,
    HTTP_STATUS,
    Conflict,
    Incompatible,
    Invalid,
    NotFound,
    TenutoError,
    TooMany,
    Unavailable,
)

REQUEST = httpx2.Request("GET", "http://server/api/v1/stats")


def answered(error: Exception) -> httpx2.Response:
    """Returns the response of the server for the error."""
    problem, headers = problems.problem_of(error)
    return httpx2.Response(
        problem.status,
        content=msgspec.json.encode(problem),
        headers={"content-type": problems.MEDIA_TYPE, **headers},
        request=REQUEST,
    )


@pytest.mark.parametrize("kind", HTTP_STATUS, ids=lambda kind: kind.__name__)
def test_every_error_class_is_restored(kind: type[TenutoError]) -> None:
    error = kind("why", retry_after=7) if issubclass(kind, TooMany) else kind("why")
    result = error_from_response(answered(error))
    assert isinstance(result, TenutoError)
    assert (type(result), result.code, result.message) == (kind, error.code, "why")
    if isinstance(result, TooMany):
        assert result.retry_after == 7


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_code_is_restored(code: str) -> None:
    result = error_from_response(answered(Conflict("why", code)))
    assert isinstance(result, TenutoError)
    assert result.code == code


def test_error_details_are_restored() -> None:
    result = error_from_response(answered(Invalid("why", field="title")))
    assert isinstance(result, Invalid)
    assert result.details == {"field": "title"}


def test_every_status_of_problem_responses_is_covered() -> None:
    used = {*HTTP_STATUS.values(), *problems._STATUS_OF_CODE.values(), 400, 405}
    assert used <= set(ERROR_CLASS_BY_STATUS)


def test_internal_error_of_the_server_is_not_repeated() -> None:
    answer = answered(ZeroDivisionError("secret"))
    result = error_from_response(answer)
    assert isinstance(result, ServerError)
    assert not is_retryable(answer, result)
    assert "secret" not in str(result)


def test_unknown_code_of_a_newer_server_maps_to_its_class() -> None:
    body = b'{"code": "brand_new", "detail": "why", "status": 404, "title": "x"}'
    kind = {"content-type": problems.MEDIA_TYPE}
    result = error_from_response(httpx2.Response(404, content=body, headers=kind, request=REQUEST))
    assert isinstance(result, NotFound)
    assert result.code == "not_found"


@pytest.mark.parametrize(
    ("status", "passing"), [(404, False), (301, False), (502, True), (504, True)]
)
def test_response_of_another_service_is_an_outage(status: int, passing: bool) -> None:
    answer = httpx2.Response(status, content=b"<html>", request=REQUEST)
    result = error_from_response(answer)
    assert isinstance(result, Unavailable)
    assert result.code == "server_unreachable"
    assert is_retryable(answer, result) is passing


@pytest.mark.parametrize(("code", "passing"), [("in_progress", True), ("out_of_turn", False)])
def test_request_in_progress_is_waited_for(code: str, passing: bool) -> None:
    answer = answered(Conflict("why", code))
    assert is_retryable(answer, error_from_response(answer)) is passing


def test_request_to_an_incompatible_server_is_not_repeated() -> None:
    answer = answered(Incompatible("too old"))
    assert answer.status_code == 503
    assert not is_retryable(answer, error_from_response(answer))


def test_request_too_large_for_a_proxy_is_not_repeated() -> None:
    request = httpx2.Request("POST", "http://server/api/v1/agent-tasks/x/complete", content=b"123")
    answer = httpx2.Response(413, text="<html>too large</html>", request=request)
    result = error_from_response(answer)
    assert isinstance(result, Invalid)
    assert (result.code, result.message) == (
        "too_large",
        "a proxy rejected the request: its 3 bytes exceed the proxy's limit",
    )
    assert not is_retryable(answer, result)
