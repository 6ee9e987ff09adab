"""Long polls: a claim waits for a task while somebody waits for the claim."""

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

Take = Callable[[], Awaitable[list[ClaimedTask]]]


RECHECK_S = 1.0
"""Seconds between looks whether the agent may still claim."""


class LongPoll:
    """One request that waits: `heard` is set by a hint, `left` by the end of its connection."""

    def __init__(self, desk: InjectedContext, agent: UUID) -> None:
        self._desk = desk
        self._agent = agent
        self.heard = asyncio.Event()
        self.left = asyncio.Event()

    async def until(self, wait_s: float, take: Take) -> list[ClaimedTask]:
        """What `take` finds, tried with each hint until the time is up or the caller has left.

        A caller or an agent that may claim no more meanwhile is refused as it would be at first.
        """
        until = self._desk.service.clock.elapsed() + wait_s
        with ExitStack() as waiting:
            return await self._until(until, take, waiting)

    async def _until(self, until: float, take: Take, waiting: ExitStack) -> list[ClaimedTask]:
        service = self._desk.service
        checked = service.clock.elapsed()
        counted = False
        while not self.left.is_set():
            self.heard.clear()
            found = await take()
            pause = min(until - service.clock.elapsed(), service.settings.poll_s)
            if found or pause <= 0 or service.stopping.is_set():
                return found
            if not counted:
                waiting.callback(self._count())
                counted = True
            await wait_first_event([self.heard, self.left, service.stopping], pause, service.clock)
            if not await service.is_still_allowed(self._desk, Role.MEMBER, "work"):
                raise Unauthenticated("the token does not hold")
            if service.clock.elapsed() - checked >= RECHECK_S:
                checked = service.clock.elapsed()
                await self._desk.registry.profile_for_claim(self._agent)
        return []

    def _count(self) -> Callable[[], None]:
        """Count a claim that waits, until the answer is called; raises `TooMany`."""
        service = self._desk.service
        return service.polls.take({self._desk.caller.key: service.settings.polls_per_token})


@asynccontextmanager
async def polling(
    desk: InjectedContext, request: Request[Any, Any, Any], agent: UUID
) -> AsyncIterator[LongPoll]:
    """A poll that hears of hints and of the end of the connection while the block runs."""
    poll = LongPoll(desk, agent)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        poll.left.set()

    watching = asyncio.create_task(watch())
    unsubscribe = desk.engine.subscribe(lambda _topic: poll.heard.set())
    try:
        yield poll
    finally:
        unsubscribe()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
