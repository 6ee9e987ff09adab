"""Signatures as in the Standard Webhooks specification: HMAC-SHA256 over `id.timestamp.body`."""

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence
from datetime import datetime

from tenuto.clock import Clock
from tenuto.model.errors import Invalid
from tenuto.model.webhooks import SIGNING_PREFIX

TOLERANCE_S = 300
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 24, 64


def headers(secrets: Sequence[str], message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Returns the headers with message id, timestamp, and one signature per secret."""
    stamp = str(int(at.timestamp()))
    signatures = (f"v1,{_signature(secret, message_id, stamp, body)}" for secret in secrets)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": stamp,
        "webhook-signature": " ".join(signatures),
    }


def verify(
    secret: str, received: Mapping[str, str], body: bytes, now: datetime | None = None
) -> None:
    """Raises `Invalid` unless the message was signed with the secret within the last five minutes.

    `body` is the received body, byte for byte. A message may arrive more than once, with the same
    `webhook-id`.
    """
    by_name = {name.lower(): value for name, value in received.items()}
    message_id, stamp = by_name.get("webhook-id", ""), by_name.get("webhook-timestamp", "")
    if not stamp.isascii() or not stamp.isdigit() or len(stamp) > 12:
        raise Invalid("the header webhook-timestamp is missing or invalid", "signature_invalid")
    at = (now or Clock().now()).timestamp()
    if abs(at - int(stamp)) > TOLERANCE_S:
        raise Invalid(
            "the message is older than 5 minutes, or a clock is wrong", "signature_invalid"
        )
    expected = _signature(secret, message_id, stamp, body).encode()
    matches = False
    for signature in by_name.get("webhook-signature", "").split(" "):
        version, _, value = signature.partition(",")
        matches |= version == "v1" and hmac.compare_digest(_encode_text(value), expected)
    if not matches:
        raise Invalid("the message is not signed with this secret", "signature_invalid")


def _signature(secret: str, message_id: str, stamp: str, body: bytes) -> str:
    """Returns the signature in base64; `stamp`: seconds since 1970, as text."""
    signed = _encode_text(f"{message_id}.{stamp}.") + body
    return base64.b64encode(hmac.digest(_decode_secret(secret), signed, "sha256")).decode()


def _encode_text(text: str) -> bytes:
    """Returns the text as UTF-8, with `?` for lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace")


def _decode_secret(secret: str) -> bytes:
    """Returns the key bytes of a signing secret; raises `Invalid` if it is malformed."""
    try:
        key = base64.b64decode(secret.removeprefix(SIGNING_PREFIX), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid("the secret is not base64", "signature_invalid") from error
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise Invalid(
            f"the secret must have {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes", "signature_invalid"
        )
    return key
