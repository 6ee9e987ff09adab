"""Requests that carry an `Idempotency-Key`: repeated within a day, they are answered as before.

A task's key is part of the task. This is for the other requests that make something, but for those
whose answer holds a secret: what is shown once is stored nowhere.
"""

import hmac
import logging
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
from litestar import Request, Response

from tenuto.api.edge.problems import FAULT
from tenuto.encryption_keys import KeyRing
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Unavailable
from tenuto.store.protocol import Row, Script, Statement, Store

log = logging.getLogger("tenuto.api")

LARGEST = 1024 * 1024
"""Bytes of an answer that are kept, enough for the largest bulk; a repetition of a request with a
larger one is refused, so that what it made is not made twice."""
PURPOSE = "idempotency"
ANSWERED_WITHIN = timedelta(minutes=2)
"""For how long a request without an answer is taken to be under way."""
_LOOKS = 3
ROUTES = frozenset(
    {
        "POST /api/v1/agent-tasks/bulk",
        "POST /api/v1/agent-tasks/actions",
        "POST /api/v1/agent-tasks/{task_id}/rerun",
        "POST /api/v1/flows",
        "POST /api/v1/flows/{flow_id}/rerun",
        "POST /api/v1/groups",
        "POST /api/v1/groups/{group_id}/start",
        "POST /api/v1/schedules",
        "POST /api/v1/triggers",
        "POST /api/v1/events",
    }
)


class StoredResponse(msgspec.Struct, frozen=True):
    """An answer that was given before."""

    status: int
    body: bytes


class RepeatedRequest(Exception):
    """The request was answered before."""

    def __init__(self, kept: StoredResponse) -> None:
        super().__init__("answered before")
        self.kept = kept


class IdempotencyStore:
    """The answers of one workspace."""

    def __init__(self, store: Store, vault: KeyRing, workspace: UUID) -> None:
        self._store = store
        self._vault = vault
        self._workspace = workspace

    async def begin(self, key: str, route: str, path: str, body: bytes) -> None:
        """Note that the request is being answered; raises `Repeated` when it was before."""
        bounds.text("Idempotency-Key", key, bounds.MAX_NAME, empty=False)
        text = path.encode() + b"\n" + body
        secrets = self._vault.derive_all(PURPOSE).values()
        # The first is what is kept; the key may have been changed since the first request.
        said, *before = (hmac.new(each, text, "sha256").hexdigest() for each in secrets)
        now = self._store.clock.now()
        params = {
            "workspace": self._workspace,
            "key": key,
            "route": route,
            "fingerprint": said,
            "now": now,
        }

        def script() -> Script[Row | None]:
            for _ in range(_LOOKS):
                if (yield Statement("idempotency_begin", params)):
                    return None
                if rows := (yield Statement("idempotency_kept", params)):
                    return rows[0]
                # Forgotten between the two statements: the key is free, for one of those who ask.
            raise Conflict("the key is in use by many requests at once", "in_progress")

        row = await self._store.transact(script)
        if row is None:
            return
        if row["fingerprint"] not in (said, *before):
            raise Conflict("the key was used for another request", "idempotency_conflict")
        if row["status"] is None and now - row["created_at"] < ANSWERED_WITHIN:
            raise Conflict("the first request with the key is not answered yet", "in_progress")
        if row["status"] is None or row["status"] >= FAULT:
            raise Conflict(
                "the first request with the key ended in a fault or an outage:"
                " whether it was done is not known",
                "idempotency_conflict",
            )
        if row["body"] is None:
            raise Conflict(
                "the request was answered before, at a length that is not kept",
                "idempotency_conflict",
            )
        raise RepeatedRequest(StoredResponse(row["status"], row["body"].encode()))

    async def end(self, key: str, route: str, status: int, body: bytes) -> None:
        """Keep the answer, unless it is too long; forget a request that was refused.

        Of a fault or an outage its status is kept: nobody knows whether the request was done, so a
        repetition must not do it.
        """
        params: dict[str, Any] = {"workspace": self._workspace, "key": key, "route": route}
        wanted = Statement("idempotency_forget", params)
        if status < 300 or status >= FAULT:
            kept = body.decode() if status < 300 and len(body) <= LARGEST else None
            wanted = Statement("idempotency_end", params | {"status": status, "body": kept})

        def script() -> Script[None]:
            yield wanted

        try:
            await self._store.once(script)
        except Unavailable as error:  # the answer itself is good; a repetition of it has to wait
            log.warning("an answer is not kept: %s", error)


def repeated(request: Request[Any, Any, Any], error: RepeatedRequest) -> Response[bytes]:
    """The answer that was given before."""
    del request
    return Response(
        error.kept.body,
        status_code=error.kept.status,
        media_type="application/json",
        headers={"Idempotency-Replayed": "true"},
    )
