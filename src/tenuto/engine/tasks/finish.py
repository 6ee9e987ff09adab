"""Ends: how an attempt's end is recorded, once and only for the attempt that owns the task."""

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.chains import ChainedCompletion, ClaimSnapshot
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.limits.budgets import counted, spend
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.engine.tenancy.output_redaction import IN_ITS_WORDS, check_fence, check_report, redacted
from tenuto.model import bounds
from tenuto.model.flows.progress import ControlTaskFailed
from tenuto.model.limits.budgets import Usage, check_usage
from tenuto.model.tasks import commands
from tenuto.model.tasks.decide import token_hash
from tenuto.model.tasks.task import Fence, Status, TaskChange
from tenuto.store.batching import Answers, WriteKind
from tenuto.store.protocol import Script, Statement


class _Completion(msgspec.Struct, frozen=True):
    command: commands.Complete
    workspace: UUID
    actor: str | None
    usage: Usage | None = None
    standing: ClaimSnapshot | None = None


class _CompletionResult(msgspec.Struct, frozen=True):
    """Whether a completion was accepted; one of a batch brings what followed."""

    moved: bool
    cascade: Cascade | None = None
    lanes: set[int] = set()


class AttemptFinisher:
    """The ends of one workspace's attempts, and their beginnings."""

    def __init__(self, core: Core, sealing: TaskSecrets, workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace
        self._sealing = sealing
        self._complete = WriteKind("complete", self._complete_script, one_statement=True)
        self._watched = WriteKind(
            "complete_watched", self._watched_script, leads=True, single=self._linked
        )

    async def complete(
        self,
        fence: Fence,
        workspace: UUID,
        output: Any,
        summary: str | None,
        actor: str | None,
        usage: Usage | None = None,
    ) -> None:
        """Record the result; accepted once, and only from the attempt that owns the task."""
        check_fence(fence)
        redactor = self._sealing.known(fence) or await self._sealing.redactor(fence)
        if summary is not None:
            summary = redactor.text(bounds.text("summary", summary, bounds.MAX_TEXT))
        text = redactor.json(bounds.json_text("output", output))
        command = commands.Complete(fence=fence, output=text, summary=summary)
        _check_usage(usage)
        standing = self._core.watched.take(fence.task)
        known = standing is not None or usage is not None
        result = _Completion(command, workspace, actor, usage, standing)
        moved = not known and await self._core.batcher.submit(
            self._complete, result, key=fence.task.int
        )
        if not moved:
            await self._complete_with_cascade(result)
        self._sealing.forget(fence)

    async def _complete_with_cascade(self, result: _Completion) -> None:
        """Finish a task together with what follows from it."""
        fence = result.command.fence
        try:
            done: _CompletionResult = await self._core.batcher.submit(
                self._watched, result, key=fence.task.int
            )
        except ControlTaskFailed as error:
            failure = commands.Failure(message=error.message, retryable=False)
            fail = commands.Fail(fence=fence, failure=failure)
            await self.order(fail, result.actor, result.usage)
            return
        if result.usage is not None and done.moved:
            counted(result.usage)
        if done.cascade is not None:
            self._core.announce_cascade(done.cascade)
        if done.lanes:
            self._core.wakeups.announce([f"lane:{lane}" for lane in done.lanes])
        if not done.moved:
            # Neither of the plain cases: the model says what it is.
            await self._ordered(result.command, result.workspace, result.actor)

    async def _ordered(
        self,
        command: commands.AttemptCommand,
        workspace: UUID,
        actor: str | None,
        usage: Usage | None = None,
    ) -> TaskChange | None:
        """Apply a command, and count with it what its attempt has used."""
        task = command.fence.task
        first = None
        if usage is not None:
            first = partial(spend, self._core, workspace, command.fence, usage, at_end=True)
        return await self._core.apply_command(
            task, command, workspace=workspace, actor=actor, first=first
        )

    def _watched_script(self, results: list[_Completion]) -> Script[Answers]:
        plain = yield from self._count_usage(results)
        rows = yield self._completion("complete_watched", results)
        cascade = self._core.cascade(results[0].actor, strict=True)
        yield from cascade.run(
            FinishedTask(row["id"], row["workspace"], Status.COMPLETED, row)
            for row in sorted(rows, key=lambda row: row["id"].int)
        )
        moved = {row["id"] for row in rows} | plain
        told = [_CompletionResult(each.command.fence.task in moved) for each in results]
        told[0] = _CompletionResult(told[0].moved, cascade)
        return told

    def _linked(self, result: _Completion) -> Callable[[], Script[_CompletionResult | None]] | None:
        """A completion and what follows from it in one statement, if that is known to be plain."""
        if result.standing is None or result.usage is not None:
            return None
        link = self._core.link(result.command.fence.task, result.standing, result.actor)
        return None if link is None else partial(self._linked_script, result, link)

    def _linked_script(
        self, result: _Completion, link: ChainedCompletion
    ) -> Script[_CompletionResult | None]:
        fence, found = result.command.fence, _found(result)
        params = {
            "id": fence.task,
            "attempt": fence.attempt,
            "token": token_hash(fence.token),
            "workspace": result.workspace,
            "now": self._core.now(),
        }
        rows = yield link.statement(params, [] if found is None else [found])
        if not rows:
            return None
        woken = {row["lane"] for row in rows if row.get("status") == Status.PENDING}
        return _CompletionResult(moved=True, lanes=woken | link.lanes)

    def _count_usage(self, results: list[_Completion]) -> Script[set[UUID]]:
        """Count what attempts used that say so at their end; those whose end nobody watches end."""
        paying = []
        for each in results:
            if each.usage is not None:
                yield from spend(
                    self._core, self._workspace, each.command.fence, each.usage, at_end=True
                )
                paying.append(each)
        if not paying:
            return set()
        rows = yield self._completion("complete_if_owned", paying)
        return {row["id"] for row in rows}

    def _complete_script(self, results: list[_Completion]) -> Script[Answers]:
        rows = yield self._completion("complete_if_owned", results)
        if len(rows) == len(results):
            return [True] * len(results)
        moved = {row["id"] for row in rows}
        return [result.command.fence.task in moved for result in results]

    def _completion(self, query: str, results: list[_Completion]) -> Statement:
        done = []
        found = []
        for result in sorted(results, key=lambda each: each.command.fence.task.int):
            fence = result.command.fence
            done.append((fence.task, fence.attempt, token_hash(fence.token)))
            if (each := _found(result)) is not None:
                found.append(each)
        params = {"now": self._core.now(), "workspace": self._workspace}
        return Statement(query, params, {"done": done, "result": found})

    async def order(
        self, command: commands.AttemptCommand, actor: str | None, usage: Usage | None = None
    ) -> TaskChange | None:
        """Any other end of an attempt, or its beginning, as the model decides."""
        check_report(command)
        _check_usage(usage)
        if any(getattr(command, field, None) is not None for field in IN_ITS_WORDS):
            command = redacted(command, await self._sealing.redactor(command.fence))
        change = await self._ordered(command, self._workspace, actor, usage)
        if usage is not None and change is not None:
            counted(usage)
        if not isinstance(command, commands.Begin):
            self._sealing.forget(command.fence)
        return change

    async def receipt(self, fence: Fence, receipt: dict[str, Any]) -> dict[str, Any]:
        """A receipt as it may be stored."""
        bounds.json_text("receipt", receipt)
        struck_out: dict[str, Any] = (await self._sealing.redactor(fence)).value(receipt)
        return struck_out


def _found(result: _Completion) -> tuple[Any, ...] | None:
    """The row of what an attempt has made, if it has made anything."""
    command = result.command
    if command.output is None and command.summary is None:
        return None
    return command.fence.task, result.workspace, command.output, command.summary


def _check_usage(usage: Usage | None) -> None:
    if usage is not None:
        check_usage(usage)
