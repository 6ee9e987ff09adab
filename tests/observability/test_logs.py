"""Logs: lines for people or JSON, and no secret in any of them."""

import logging
import subprocess
import sys
from base64 import b64encode
from datetime import datetime

import pytest
from tests.contract.conftest import claim_one, new
from tests.observability.conftest import Log
from tests.observability.hostile import STORABLE, check_log
from tests.secrets.conftest import OLD

from tenuto import logs
from tenuto.encryption_keys import KeyRing
from tenuto.engine.engine import Engine
from tenuto.logs import MAX_SECRETS, mask_in_logs, redact

CANARY = "canary-Zq8w-4711"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"


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
def test_log_record_shows_no_secret(log: Log, secret: str) -> None:
    mask_in_logs([CANARY])
    ours = logging.getLogger("tenuto.test")
    ours.info("as text: %s", secret)
    ours.warning("inside: {'a': 'x%sy'}", secret)
    ours.error(ValueError(secret))
    ours.info("a field", extra={"fields": {"actor": secret, "ms": 1, "all": [secret, "\ud800"]}})
    ours.info("%d", secret)
    try:
        boom(f"because of {secret}")
    except ValueError:
        ours.exception("failed with %r", [secret])
    assert log.text.count("***") >= 5
    assert secret not in log.text


def test_password_of_an_address_is_redacted(log: Log) -> None:
    logging.getLogger("tenuto").info("at postgresql://me:pa55:word@db/x, and http://a:b@c")
    assert "pa55" not in log.text
    assert "postgresql://me:***@db/x, and http://a:***@c" in log.text


def test_log_text_without_a_secret_is_unchanged() -> None:
    for text in ("tnt_short", "the whsec_ prefix", "a://b:c/d@e", "12:30 me@home", "eyJ.x.y"):
        assert redact(text) == text


def test_cached_secrets_are_evicted_oldest_first() -> None:
    mask_in_logs([f"secret-number-{n:05}" for n in range(MAX_SECRETS + 1)])
    assert redact("secret-number-00000") == "secret-number-00000"
    assert redact(f"secret-number-{MAX_SECRETS:05}") == "***"
    mask_in_logs(["secret-number-00001", "one-more-secret"])
    assert redact("secret-number-00001 secret-number-00002") == "*** secret-number-00002"


async def test_decrypted_secret_is_in_no_log_line(engine: Engine, log: Log) -> None:
    named, own = "canary-named-0815", "canary-own-0816"
    sealing = Engine(engine.store, actor="tester", key_ring=KeyRing(OLD))
    await sealing.secrets.put("key", named)
    await sealing.submit(new(input={"a": {"$secret": "key"}, "secrets": {"b": own}}))
    work = await claim_one(sealing)
    assert set(work.secrets) == {named, own}
    logging.getLogger("tenuto.worker").info("work: %r", work)
    assert named not in log.text
    assert own not in log.text


@pytest.mark.parametrize("style", ["json"], indirect=True)
def test_json_log_line_has_its_request_and_task(log: Log) -> None:
    ours = logging.getLogger("tenuto.test")
    tokens = logs.REQUEST.set("r-1"), logs.TASK.set("t-1")
    ours.info("one\nline \x1b[31m")
    logs.REQUEST.reset(tokens[0])
    logs.TASK.reset(tokens[1])
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
def test_text_log_line_has_no_control_characters(log: Log) -> None:
    logging.getLogger("tenuto.test").info("a\x1b[31mb\rc\nd\u2028\u202e\x9b\ud800")
    output = "a\\x1b[31mb\\rc\\nd\\u2028\\u202e\\x9b\\ud800\n"
    assert log.text.endswith(f"INFO     tenuto.test: {output}")


@pytest.mark.parametrize("style", [""], indirect=True)
def test_stack_trace_lines_are_marked(log: Log) -> None:
    try:
        boom("x\n12:00:00 CRITICAL tenuto: forged")
    except ValueError:
        logging.getLogger("tenuto.test").exception("failed", stack_info=True)
    first, *further = log.text.removesuffix("\n").split("\n")
    assert first.endswith("ERROR    tenuto.test: failed")
    assert "    | 12:00:00 CRITICAL tenuto: forged" in further
    assert "    | Stack (most recent call last):" in further
    assert all(line.startswith("    | ") for line in further)


class _Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError


def test_log_argument_that_cannot_be_printed_does_no_harm(log: Log) -> None:
    logging.getLogger("tenuto.test").info("%s", _Unspeakable())
    assert "cannot be formatted: RuntimeError" in log.text


OTHERS = """
import logging, sys, warnings
from tenuto import logs
logs.set_up(style=sys.argv[1])
text = sys.stdin.read()
for name in ("uvicorn.error", "asyncio", "httpx2", "litestar"):
    logging.getLogger(name).error("odd: %s", text)
warnings.warn(text)
"""


def test_log_lines_of_other_libraries_are_escaped(style: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, style],
        input=STORABLE,
        capture_output=True,
        text=True,
        check=True,
    )
    check_log(done.stderr, style)
    assert done.stderr.count("\n") == 5
    assert "UserWarning" in done.stderr
