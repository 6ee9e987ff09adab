"""Long polls: a claim request that waits until a task can be claimed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

from litestar import Request

from tenuto.api.service import InjectedContext
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.errors import Unauthenticated
from tenuto.model.tenancy.access import Role
from tenuto.periodic import wait_first_event

ClaimOnce = Callable[[], Awaitable[list[ClaimedTask]]]

RECHECK_S = 1.0
"""Seconds between checks that the agent may still claim."""


class LongPoll:
    """One waiting claim request.

    `hint_received` is set by a hint, `disconnected` when the client closes the connection.
    """

    def __init__(self, ctx: InjectedContext, agent: UUID) -> None:
        self._ctx = ctx
        self._agent = agent
        self.hint_received = asyncio.Event()
        self.disconnected = asyncio.Event()

    async def claim_within(self, wait_s: float, claim_once: ClaimOnce) -> list[ClaimedTask]:
        """Claims now and after hints and poll intervals; returns the first tasks, [] at the end.

        The end is when the time is up, the client disconnected or the server stops. Raises if the
        caller or the agent loses the right to claim while it waits.
        """
        deadline = self._ctx.service.clock.elapsed() + wait_s
        with ExitStack() as waiting:
            return await self._claim_until(deadline, claim_once, waiting)

    async def _claim_until(
        self, deadline: float, claim_once: ClaimOnce, waiting: ExitStack
    ) -> list[ClaimedTask]:
        """Claims until there are tasks or `deadline`; `waiting` gets what releases the count."""
        service = self._ctx.service
        checked_at = service.clock.elapsed()
        is_counted = False
        while not self.disconnected.is_set():
            self.hint_received.clear()
            claimed = await claim_once()
            pause = min(deadline - service.clock.elapsed(), service.settings.poll_s)
            if claimed or pause <= 0 or service.stopping.is_set():
                return claimed
            if not is_counted:
                waiting.callback(self._count_waiting_claim())
                is_counted = True
            await wait_first_event(
                [self.hint_received, self.disconnected, service.stopping], pause, service.clock
            )
            if not await service.is_still_allowed(self._ctx, Role.MEMBER, "work"):
                raise Unauthenticated("the token is expired or revoked")
            if service.clock.elapsed() - checked_at >= RECHECK_S:
                checked_at = service.clock.elapsed()
                await self._ctx.agents.profile_for_claim(self._agent)
        return []

    def _count_waiting_claim(self) -> Callable[[], None]:
        """Counts a waiting claim of the token or raises `TooMany`; returns what releases it."""
        service = self._ctx.service
        return service.waiting_claims.acquire(
            {self._ctx.caller.key: service.settings.polls_per_token}
        )


@asynccontextmanager
async def long_poll(
    ctx: InjectedContext, request: Request[Any, Any, Any], agent: UUID
) -> AsyncIterator[LongPoll]:
    """Context with a long poll that any hint or the client's disconnect wakes."""
    poll = LongPoll(ctx, agent)

    async def watch_disconnect() -> None:
        """Sets `disconnected` when the client closes the connection."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        poll.disconnected.set()

    disconnect_task = asyncio.create_task(watch_disconnect())
    unsubscribe = ctx.engine.subscribe(lambda _topic: poll.hint_received.set())
    try:
        yield poll
    finally:
        unsubscribe()
        disconnect_task.cancel()
        await asyncio.gather(disconnect_task, return_exceptions=True)
