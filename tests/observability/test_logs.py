"""Logs: lines for people or JSON, and no secret in any of them."""

import io
import logging
import sys
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec
import pytest
from tests.contract.conftest import claim_one, new
from tests.secrets.conftest import OLD

from tenuto import telemetry
from tenuto.engine.engine import Engine
from tenuto.telemetry import MOST_SECRETS, keep_secret, struck
from tenuto.vault import Vault

CANARY = "canary-Zq8w-4711"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"


class Log:
    """The program's log as it is written."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def json(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.text.splitlines()]


@pytest.fixture(params=["", "json"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def log(style: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    ours = logging.getLogger("tenuto")
    before = ours.handlers[:], ours.level, ours.propagate
    telemetry.set_up("DEBUG", style)
    yield Log(stream)
    ours.handlers[:], _, ours.propagate = before
    ours.setLevel(before[1])


def boom(message: str) -> None:
    raise ValueError(message)


@pytest.mark.parametrize(
    "secret",
    [
        "tnt_0123456789abcdef",
        "tns_0123456789abcdef-_",
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        JWT,
        CANARY,
        b64encode(CANARY.encode()).decode(),
    ],
)
def test_no_part_of_a_record_shows_a_secret(log: Log, secret: str) -> None:
    keep_secret([CANARY])
    ours = logging.getLogger("tenuto.test")
    ours.info("as text: %s", secret)
    ours.warning("inside: {'a': 'x%sy'}", secret)
    ours.error(ValueError(secret))
    ours.info("a field", extra={"fields": {"actor": secret, "ms": 1}})
    ours.info("%d", secret)
    try:
        boom(f"because of {secret}")
    except ValueError:
        ours.exception("failed with %r", [secret])
    assert log.text.count("***") >= 5
    assert secret not in log.text


def test_the_password_of_an_address_is_struck(log: Log) -> None:
    logging.getLogger("tenuto").info("at postgresql://me:pa55:word@db/x, and http://a:b@c")
    assert "pa55" not in log.text
    assert "postgresql://me:***@db/x, and http://a:***@c" in log.text


def test_what_is_no_secret_stays() -> None:
    for text in ("tnt_short", "the whsec_ prefix", "a://b:c/d@e", "12:30 me@home", "eyJ.x.y"):
        assert struck(text) == text


def test_secrets_are_given_up_oldest_first() -> None:
    keep_secret([f"secret-number-{n:05}" for n in range(MOST_SECRETS + 1)])
    assert struck("secret-number-00000") == "secret-number-00000"
    assert struck(f"secret-number-{MOST_SECRETS:05}") == "***"
    keep_secret(["secret-number-00001", "one-more-secret"])
    assert struck("secret-number-00001 secret-number-00002") == "*** secret-number-00002"


async def test_a_secret_that_was_opened_is_in_no_line(engine: Engine, log: Log) -> None:
    named, own = "canary-named-0815", "canary-own-0816"
    sealing = Engine(engine.store, actor="tester", vault=Vault(OLD))
    await sealing.secrets.put("key", named)
    await sealing.submit(new(input={"a": {"$secret": "key"}, "secrets": {"b": own}}))
    work = await claim_one(sealing)
    assert set(work.secrets) == {named, own}
    logging.getLogger("tenuto.worker").info("work: %r", work)
    assert named not in log.text
    assert own not in log.text


@pytest.mark.parametrize("style", ["json"], indirect=True)
def test_json_says_where_a_line_belongs(log: Log) -> None:
    ours = logging.getLogger("tenuto.test")
    tokens = telemetry.REQUEST.set("r-1"), telemetry.TASK.set("t-1")
    ours.info("one\nline \x1b[31m")
    telemetry.REQUEST.reset(tokens[0])
    telemetry.TASK.reset(tokens[1])
    try:
        boom("x")
    except ValueError:
        ours.exception("failed")
    first, second = log.json
    assert datetime.fromisoformat(first.pop("ts")).tzinfo is not None
    assert first == {
        "level": "INFO",
        "logger": "tenuto.test",
        "message": "one\nline \x1b[31m",
        "request_id": "r-1",
        "task_id": "t-1",
    }
    assert set(second) == {"ts", "level", "logger", "message", "stack"}
    assert second["stack"].endswith("ValueError: x")


@pytest.mark.parametrize("style", [""], indirect=True)
def test_a_line_for_people_has_no_control_characters(log: Log) -> None:
    logging.getLogger("tenuto.test").info("a\x1b[31mb\rc")
    assert log.text.endswith("INFO     tenuto.test: a\\x1b[31mb\\rc\n")
