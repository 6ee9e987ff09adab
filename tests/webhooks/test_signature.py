"""Signatures of the Standard Webhooks specification."""

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta

import pytest

from tenuto.clock import Clock
from tenuto.engine.webhooks.endpoints import new_secret
from tenuto.model.errors import Invalid
from tenuto.webhooks import signature

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
SECRET = new_secret(Clock())
OTHER = new_secret(Clock())
BODY = b'{"event": "task.dead"}'


def signed(*secrets: str) -> dict[str, str]:
    return signature.headers(secrets or (SECRET,), "msg-1", NOW, BODY)


def refused(headers: dict[str, str], body: bytes = BODY, now: datetime = NOW) -> str:
    with pytest.raises(Invalid) as caught:
        signature.verify(SECRET, headers, body, now)
    assert caught.value.code == "signature_invalid"
    return caught.value.message


def test_signature_equals_the_example_of_the_specification() -> None:
    at = datetime.fromtimestamp(1614265330, UTC)
    headers = signature.headers(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        at,
        b'{"test": 2432232314}',
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_signature_is_the_hmac_of_id_time_and_body() -> None:
    headers = signed()
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    content = b"msg-1." + headers["webhook-timestamp"].encode() + b"." + BODY
    mac = hmac.new(key, content, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(mac).decode()}"
    assert len(key) == 32


def test_signed_message_verifies() -> None:
    signature.verify(SECRET, signed(), BODY, NOW)
    signature.verify(SECRET, {k.title(): v for k, v in signed().items()}, BODY, NOW)
    now = signature.headers([SECRET], "msg-2", Clock().now(), BODY)
    signature.verify(SECRET, now, BODY)


def test_both_secrets_verify_during_a_rotation() -> None:
    headers = signed(OTHER, SECRET)
    signature.verify(SECRET, headers, BODY, NOW)
    signature.verify(OTHER, headers, BODY, NOW)


@pytest.mark.parametrize("seconds", [-301, 301, 86_400])
def test_old_message_is_refused(seconds: int) -> None:
    assert "older than 5 minutes" in refused(signed(), now=NOW + timedelta(seconds=seconds))
    signature.verify(SECRET, signed(), BODY, NOW + timedelta(seconds=seconds % 300))


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-id": "msg-2"},
        {"webhook-timestamp": str(int(NOW.timestamp()) + 1)},
        {"webhook-signature": ""},
        {"webhook-signature": "v1,"},
        {"webhook-signature": "v1,AAAA v2,BBBB"},
        {"webhook-signature": "v1,\u00fc"},
        {"webhook-signature": "v1,\udc80"},
        {"webhook-timestamp": ""},
        {"webhook-timestamp": "-1"},
        {"webhook-timestamp": "\u0661"},
        {"webhook-timestamp": "9" * 400},
        {"webhook-timestamp": "nan"},
    ],
)
def test_altered_message_is_refused(change: dict[str, str]) -> None:
    assert refused(signed() | change)


def test_other_version_body_or_secret_is_refused() -> None:
    headers = signed()
    refused(headers, BODY + b" ")
    refused(headers | {"webhook-signature": headers["webhook-signature"].replace("v1,", "v1a,")})
    refused(signed(OTHER))
    refused({})


@pytest.mark.parametrize(
    "secret", ["whsec_", "whsec_!!!", "whsec_" + "A" * 28, "whsec_" + "A" * 92, "\u00fc"]
)
def test_weak_secret_is_refused(secret: str) -> None:
    with pytest.raises(Invalid) as caught:
        signature.headers([secret], "msg-1", NOW, BODY)
    assert caught.value.code == "signature_invalid"
    assert secret not in caught.value.message or secret == "whsec_"
