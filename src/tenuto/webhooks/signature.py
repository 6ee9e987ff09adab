"""Signatures as in the Standard Webhooks specification: HMAC-SHA256 over `id.timestamp.body`."""

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence
from datetime import datetime

from tenuto.clock import Clock
from tenuto.model.errors import Invalid
from tenuto.model.webhooks import WHSEC

TOLERANCE_S = 300
_LEAST, _MOST = 24, 64


def headers(secrets: Sequence[str], message: str, at: datetime, body: bytes) -> dict[str, str]:
    """The headers that say who sent the message and when; one signature per secret."""
    stamp = str(int(at.timestamp()))
    signatures = (f"v1,{_signature(each, message, stamp, body)}" for each in secrets)
    return {
        "webhook-id": message,
        "webhook-timestamp": stamp,
        "webhook-signature": " ".join(signatures),
    }


def verify(
    secret: str, received: Mapping[str, str], body: bytes, now: datetime | None = None
) -> None:
    """Raise `Invalid` unless the message was signed with the secret within the last five minutes.

    `body` is what arrived, byte for byte. A message may come more than once: `webhook-id` tells.
    """
    given = {name.lower(): value for name, value in received.items()}
    message, stamp = given.get("webhook-id", ""), given.get("webhook-timestamp", "")
    if not stamp.isascii() or not stamp.isdigit() or len(stamp) > 12:
        raise Invalid("the message has no timestamp", "signature_invalid")
    at = (now or Clock().now()).timestamp()
    if abs(at - int(stamp)) > TOLERANCE_S:
        raise Invalid("the message is too old, or a clock is wrong", "signature_invalid")
    expected = _signature(secret, message, stamp, body).encode()
    matching = False
    for signature in given.get("webhook-signature", "").split(" "):
        version, _, value = signature.partition(",")
        matching |= version == "v1" and hmac.compare_digest(_bytes(value), expected)
    if not matching:
        raise Invalid("the message is not signed with this secret", "signature_invalid")


def _signature(secret: str, message: str, stamp: str, body: bytes) -> str:
    signed = _bytes(f"{message}.{stamp}.") + body
    return base64.b64encode(hmac.digest(_key(secret), signed, "sha256")).decode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(WHSEC), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid("the secret is not base64", "signature_invalid") from error
    if not _LEAST <= len(key) <= _MOST:
        raise Invalid(f"the secret must have {_LEAST} to {_MOST} bytes", "signature_invalid")
    return key
