"""Stores responses by `Idempotency-Key`: a request repeated within a day gets the same response.

The key of a task is stored with the task. This module serves the other requests that create
something, except those whose response contains a secret: secrets shown once are never stored.
"""

import hmac
import logging
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
from litestar import Request, Response

from tenuto.api.edge.problems import INTERNAL_ERROR
from tenuto.encryption_keys import KeyRing
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Unavailable
from tenuto.store.protocol import Row, Script, Statement, Store

log = logging.getLogger("tenuto.api")

MAX_STORED_BYTES = 1024 * 1024
"""Maximum bytes of a stored response, enough for the largest bulk request. A repeated request with
a larger response is refused, so that it does not create anything twice."""
PURPOSE = "idempotency"
MAX_IN_PROGRESS = timedelta(minutes=2)
"""How long a request without a stored response counts as still in progress."""
_MAX_TRIES = 3


class StoredResponse(msgspec.Struct, frozen=True):
    """Status and body of an earlier response."""

    status: int
    body: bytes


class RepeatedRequest(Exception):
    """The request was answered before; `response` is the stored response."""

    def __init__(self, response: StoredResponse) -> None:
        super().__init__("answered before")
        self.response = response


class IdempotencyStore:
    """The stored responses of one workspace."""

    def __init__(self, store: Store, vault: KeyRing, workspace: UUID) -> None:
        self._store = store
        self._vault = vault
        self._workspace = workspace

    async def begin(self, key: str, route: str, path: str, body: bytes) -> None:
        """Records the request as in progress; raises `RepeatedRequest` (answered) or `Conflict`.

        `Conflict`: the key is in use or was used for another request, or the outcome of the first
        request is unknown or not stored.
        """
        bounds.check_text("Idempotency-Key", key, bounds.MAX_NAME, empty=False)
        text = path.encode() + b"\n" + body
        secrets = self._vault.derive_all(PURPOSE).values()
        # The first one is stored; older ones match if the key ring changed since the first request.
        fingerprint, *older_fingerprints = (
            hmac.new(secret, text, "sha256").hexdigest() for secret in secrets
        )
        now = self._store.clock.now()
        params = {
            "workspace": self._workspace,
            "key": key,
            "route": route,
            "fingerprint": fingerprint,
            "now": now,
        }

        def script() -> Script[Row | None]:
            for _ in range(_MAX_TRIES):
                if (yield Statement("idempotency_begin", params)):
                    return None
                if rows := (yield Statement("idempotency_by_key", params)):
                    return rows[0]
                # Deleted between the two statements: the key is free again, so try again.
            raise Conflict(
                "the Idempotency-Key is in use by many requests at once; try again later",
                "in_progress",
            )

        row = await self._store.transact(script)
        if row is None:
            return
        if row["fingerprint"] not in (fingerprint, *older_fingerprints):
            raise Conflict(
                "the Idempotency-Key was used for another request; use a new key",
                "idempotency_conflict",
            )
        if row["status"] is None and now - row["created_at"] < MAX_IN_PROGRESS:
            raise Conflict(
                "the first request with this Idempotency-Key is in progress; try again later",
                "in_progress",
            )
        if row["status"] is None or row["status"] >= INTERNAL_ERROR:
            raise Conflict(
                "the first request with this Idempotency-Key ended in an internal error or outage,"
                " its outcome is unknown; check it, then use a new key",
                "idempotency_conflict",
            )
        if row["body"] is None:
            raise Conflict(
                "the request was answered before, with a response too large to be stored",
                "idempotency_conflict",
            )
        raise RepeatedRequest(StoredResponse(row["status"], row["body"].encode()))

    async def store_response(self, key: str, route: str, status: int, body: bytes) -> None:
        """Stores status and body for repeated requests; deletes the record of a refused request.

        Of a response that is too large, an internal error or an outage only the status is stored,
        so that a repeated request does not run again. A failed write is logged.
        """
        params: dict[str, Any] = {"workspace": self._workspace, "key": key, "route": route}
        statement = Statement("idempotency_delete", params)
        if status < 300 or status >= INTERNAL_ERROR:
            stored_body = body.decode() if status < 300 and len(body) <= MAX_STORED_BYTES else None
            statement = Statement(
                "idempotency_finish", params | {"status": status, "body": stored_body}
            )

        def script() -> Script[None]:
            yield statement

        try:
            await self._store.transact_one(script)
        except Unavailable as error:  # the response is still sent; a repeated request must wait
            log.warning("a response was not stored for its Idempotency-Key: %s", error)


def replay_response(request: Request[Any, Any, Any], error: RepeatedRequest) -> Response[bytes]:
    """Returns the stored response, with the header `Idempotency-Replayed`."""
    del request
    return Response(
        error.response.body,
        status_code=error.response.status,
        media_type="application/json",
        headers={"Idempotency-Replayed": "true"},
    )
