"""Request bodies: read after authentication, and checked without blocking the loop."""

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.api.conftest import V1, Api, problem, replaced, running
from tests.api.edge.test_connection import raw
from tests.moved_time import MovedTime

from tenuto.api.edge import json_checks
from tenuto.api.edge.json_checks import check_large, check_small
from tenuto.api.edge.middleware import UNREAD_BODY_S
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings

TASKS = f"{V1}/agent-tasks"
JSON = {"content-type": "application/json"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """These tests do not depend on the database."""
    return Settings(database=f"sqlite:///{tmp_path}/t.db", data=str(tmp_path), port=0)


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Api]:
    async with running(settings) as api:
        yield api


REFUSED = {
    "no token": (None, "POST", TASKS, (401, "unauthenticated")),
    "a wrong token": ("tnt_wrong", "POST", TASKS, (401, "unauthenticated")),
    "no right": (Role.VIEWER, "POST", TASKS, (403, "forbidden")),
    "no path": (Role.OWNER, "POST", f"{V1}/nothing", (404, "not_found")),
    "no method": (Role.OWNER, "PUT", TASKS, (405, "method_not_allowed")),
    "a stranger's login": (None, "POST", f"{V1}/login", (413, "body_too_large")),
    "a VIEWER's password": (Role.VIEWER, "PUT", f"{V1}/me/password", (413, "body_too_large")),
    "a VIEWER's logout": (Role.VIEWER, "POST", f"{V1}/logout", (413, "body_too_large")),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refusal_does_not_wait_for_the_body(api: Api, case: str) -> None:
    caller, method, path, expected = REFUSED[case]
    token = await api.token(caller) if isinstance(caller, Role) else caller
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += "" if token is None else f"Authorization: Bearer {token}\r\n"
    async with raw(api) as client:
        await client.send(f"{head}Content-Length: 15000000\r\n\r\n{{".encode())
        status, body = await client.answer()
        assert (status, body["code"]) == expected
    library = await api.client(token)
    answer = await library.request(method, path, content=b" " * 15_000_000, headers=JSON)
    assert problem(answer) == expected
    assert answer.headers["connection"] == "close"


async def test_body_that_is_not_read_gets_no_100_continue(api: Api) -> None:
    head = f"POST {TASKS} HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\nExpect: 100-continue\r\n"
    async with raw(api) as client:
        await client.send(f"{head}\r\n".encode())
        assert (await client.answer())[0] == 401
    token = await api.token()
    async with raw(api) as client:
        kind = "Content-Type: application/json"
        await client.send(f"{head}Authorization: Bearer {token}\r\n{kind}\r\n\r\n".encode())
        assert (await client.line()).startswith(b"HTTP/1.1 100 ")
        await client.send(b'{"title": "a"} ')
        assert (await client.answer())[0] == 201


async def test_too_many_requests_are_refused_before_the_body(settings: Settings) -> None:
    async with running(replaced(settings, rate_per_s=1)) as api:
        client = await api.acting()
        for _ in range(3):
            answer = await client.post(TASKS, content=b" " * 15_000_000, headers=JSON)
        assert problem(answer) == (429, "rate_limited")


async def test_unread_body_does_not_corrupt_the_next_request(
    moved_time: MovedTime, api: Api
) -> None:
    async with raw(api) as client:
        await client.send(
            f"POST {TASKS} HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n".encode()
        )
        assert (await client.answer())[0] == 401
        await client.send(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        moved_time.advance(UNREAD_BODY_S)
        assert await client.is_closed()


async def test_one_limit_decides_the_size_of_a_body(api: Api) -> None:
    client = await api.acting()
    fits = {"title": "a", "input": {"x": ["y" * 60_000] * 180}}
    answer = await client.post(TASKS, json=fits)
    assert problem(answer)[1] != "body_too_large"  # a task's own bound is lower
    answer = await client.post(TASKS, content=b" " * 17_000_000, headers=JSON)
    assert problem(answer) == (413, "body_too_large")


async def test_large_bodies_of_one_workspace_do_not_delay_another(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, free, checked = threading.Event(), threading.Event(), json_checks.check_large

    def slow(body: bytes) -> None:
        if b"slow" in body:
            busy.set()
            assert free.wait(20)
        checked(body)

    monkeypatch.setattr(json_checks, "check_large", slow)
    theirs = await api.acting(Role.MEMBER, await api.workspace("theirs"))
    own = await api.acting(Role.MEMBER)
    many = [
        asyncio.create_task(theirs.post(TASKS, json={"title": "slow", "prompt": "x" * 70_000}))
        for _ in range(10)
    ]
    await asyncio.to_thread(busy.wait, 20)
    answer = await own.post(TASKS, json={"title": "a", "prompt": "x" * 70_000})
    assert answer.status_code == 201
    assert not any(task.done() for task in many)
    free.set()
    assert {result.status_code for result in await asyncio.gather(*many)} == {201}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"title": "a", "title": "b", "prompt": "%b"}' % (b"x" * 70_000), "invalid_json"),
        (b'{"title": "a", "t\\u0069tle": "%b"}' % (b"x" * 70_000), "invalid_json"),
        (b'{"title": "a" "%b"}' % (b"x" * 70_000), "invalid_json"),
        (b'{"title": "\xff%b"}' % (b"x" * 70_000), "invalid_json"),
        (b'{"title": "a", "input": ' + b"[" * 70_000 + b"]" * 70_000 + b"}", "too_deep"),
        (b'{"title": "a", "input": [' + b"1," * 1_000_000 + b"1]}", "too_many_values"),
    ],
)
async def test_large_body_is_checked_like_a_small_one(api: Api, body: bytes, code: str) -> None:
    client = await api.acting()
    answer = await client.post(TASKS, content=body, headers=JSON)
    assert problem(answer) == (422, code)


async def test_other_requests_are_answered_while_a_large_body_is_checked(api: Api) -> None:
    """The check must give the loop a turn; how long one takes is measured by the proof program."""
    owner, other = await api.acting(), await api.acting()
    assert (await other.get(f"{V1}/me")).status_code == 200
    body = "{" + ",".join(f'"{n:07d}":1' for n in range(900_000)) + ',"0000000":1}'
    large: asyncio.Task[httpx2.Response] = asyncio.create_task(
        owner.post(TASKS, content=body, headers=JSON)
    )
    meanwhile = 0
    while not large.done():
        assert (await other.get(f"{V1}/me")).status_code == 200
        meanwhile += 1
    assert problem(await large) == (422, "invalid_json")
    assert "duplicate name '0000000'" in (await large).json()["detail"]
    assert meanwhile > 5


def verdict(check: Any, body: bytes) -> str:
    try:
        check(body)
    except Invalid as error:
        return error.code
    return "ok"


def by_the_small_check(body: bytes) -> str:
    """The verdict of the small check and of the decoder that every body meets after it."""
    output = verdict(check_small, body)
    if output != "ok":
        return output
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return "ok" if "out of range" in str(error) else "invalid_json"
    return output


NAMES = st.sampled_from(["a", "b", "ab", "", "\n", "ä", "\U0001f600", '"', "\\", "{", "a:", ","])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | NAMES | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(st.tuples(NAMES, inner), max_size=4).map(lambda pairs: ("object", pairs))
    ),
    max_leaves=20,
)


def written(value: Any, pick: random.Random) -> str:
    """The value as JSON, with escapes and white space where chance puts them."""
    gap = pick.choice(["", "", " ", "\n\t", "\r "])
    if isinstance(value, tuple):
        pairs = [
            f"{gap}{written(name, pick)}{gap}:{written(inner, pick)}" for name, inner in value[1]
        ]
        return "{" + ",".join(pairs) + gap + "}"
    if isinstance(value, list):
        return "[" + f",{gap}".join(written(item, pick) for item in value) + gap + "]"
    if isinstance(value, str) and pick.random() < 0.5:
        units = value.encode("utf-16-be")
        return '"' + "".join(rf"\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)) + '"'
    return json.dumps(value, ensure_ascii=pick.random() < 0.5)


@given(value=VALUES, pick=st.randoms(use_true_random=False))
def test_both_checks_agree_about_json(value: Any, pick: random.Random) -> None:
    body = written(value, pick).encode("utf-8", "surrogatepass")
    assert verdict(check_large, body) == by_the_small_check(body)


@given(value=VALUES, pick=st.randoms(use_true_random=False), cut=st.integers(0, 99))
def test_both_checks_agree_about_broken_json(value: Any, pick: random.Random, cut: int) -> None:
    body = bytearray(written(value, pick).encode("utf-8", "surrogatepass"))
    at = cut % (len(body) + 1)
    body[at : at + pick.randrange(3)] = pick.choice([b"", b'"', b"\\", b"{", b"}", b",", b"\x00"])
    assert verdict(check_large, bytes(body)) == by_the_small_check(bytes(body))


@given(body=st.text(alphabet='{}[]",:\\u0a1 \n', max_size=30).map(str.encode))
@example(body=b"")
@example(body=b'\xef\xbb\xbf{"a": 1}')
@example(body='{"a": 1}'.encode("utf-16"))
@example(body=b'{"a": NaN}')
@example(body=b'["\\ud800"]')
@example(body=b'["\\udc00\\ud800"]')
@example(body=b'["\xed\xa0\x80"]')
@example(body=b'["\xc0\x80"]')
@example(body=b'{"\\ud83d\\ude00": 1, "\xf0\x9f\x98\x80": 2}')
@example(body=b'{"a":{"a":1},"b":[{"a":1},{"a":2}],"a":3}')
@example(body=b"[" * 5000 + b"]" * 5000)
def test_both_checks_agree_about_hostile_text(body: bytes) -> None:
    assert verdict(check_large, body) == by_the_small_check(body)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"[1,1,1]", 3),
        (b'{"a,[{":"[,{","b":2}', 2),
        (b'[{"a":1},{"b":2}]', 4),
        (b"[[1,2],[3,4]]", 6),
        (b'["x,,,,,,,,"]', 1),
    ],
)
def test_values_are_counted_outside_of_strings(
    monkeypatch: pytest.MonkeyPatch, body: bytes, count: int
) -> None:
    monkeypatch.setattr(json_checks, "MAX_VALUES", count + 1)
    assert verdict(check_large, body) == "ok"
    monkeypatch.setattr(json_checks, "MAX_VALUES", count)
    assert verdict(check_large, body) == "too_many_values"


HEADERS = {
    f"{V1}/me": {"x-content-type-options": "nosniff", "cache-control": "no-store"},
    f"{V1}/nothing": {"x-content-type-options": "nosniff", "cache-control": "no-store"},
    "/health/live": {"x-content-type-options": "nosniff"},
    "/docs": {"x-content-type-options": "nosniff"},
}


async def test_responses_have_security_headers(api: Api) -> None:
    client = await api.acting()
    for path, headers in HEADERS.items():
        answer = await client.get(path)
        assert {name: answer.headers.get(name) for name in headers} == headers, path
    policy = (await client.get("/docs")).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    created = await client.post(TASKS, json={"title": "a"})
    assert (await client.get(f"{TASKS}/{created.json()['id']}")).headers["etag"]
