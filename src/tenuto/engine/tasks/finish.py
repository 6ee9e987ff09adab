"""Stores the outcome of an attempt, once, and only for the attempt that owns the task."""

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.chains import ChainedCompletion, ClaimSnapshot
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.limits.budgets import count_in_metrics, record_usage
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.engine.tenancy.output_redaction import (
    REPORTED_TEXT_FIELDS,
    check_report,
    redact_command,
)
from tenuto.model import bounds
from tenuto.model.flows.progress import ControlTaskFailed
from tenuto.model.limits.budgets import Usage, check_usage
from tenuto.model.tasks import commands
from tenuto.model.tasks.task import Fence, Status, TaskChange, check_fence, token_hash
from tenuto.store.batching import Answers, WriteKind
from tenuto.store.protocol import Script, Statement


class _Completion(msgspec.Struct, frozen=True):
    """One completion as it waits for its batch."""

    command: commands.Complete
    workspace: UUID
    actor: str | None
    usage: Usage | None = None
    snapshot: ClaimSnapshot | None = None


class _CompletionResult(msgspec.Struct, frozen=True):
    """The result of a completion; the first one of a batch has the cascade of all."""

    is_stored: bool
    cascade: Cascade | None = None
    lanes: set[int] = set()


class AttemptFinisher:
    """Stores outcomes and starts of the attempts of one workspace."""

    def __init__(self, core: Core, task_secrets: TaskSecrets, workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace
        self._task_secrets = task_secrets
        self._plain_kind = WriteKind("complete", self._complete_plain_script, one_statement=True)
        self._watched_kind = WriteKind(
            "complete_watched",
            self._complete_watched_script,
            leads=True,
            single=self._chained_script_factory,
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
        """Stores the result once; raises `Conflict` if the attempt does not own the task."""
        check_fence(fence)
        if summary is not None:
            bounds.check_text("summary", summary, bounds.MAX_TEXT)
        text = bounds.to_json_text("output", output)
        attempt = self._core.known_attempts.find(fence)
        if attempt is None or attempt.redactor is not None:
            redactor = await self._task_secrets.redactor(fence)
            summary = None if summary is None else redactor.redact_text(summary)
            text = redactor.redact_json(text)
        command = commands.Complete(fence=fence, output=text, summary=summary)
        _check_usage(usage)
        snapshot = self._core.known_attempts.pop_snapshot(fence.task)
        needs_cascade = snapshot is not None or usage is not None
        completion = _Completion(command, workspace, actor, usage, snapshot)
        is_stored = not needs_cascade and await self._core.batcher.submit(
            self._plain_kind, completion, key=fence.task.int
        )
        if not is_stored:
            await self._complete_with_cascade(completion)
        self._core.known_attempts.evict(fence.task)

    async def _complete_with_cascade(self, completion: _Completion) -> None:
        """Completes a task with its follow-ups; fails the task if its next step is invalid."""
        fence = completion.command.fence
        try:
            result: _CompletionResult = await self._core.batcher.submit(
                self._watched_kind, completion, key=fence.task.int
            )
        except ControlTaskFailed as error:
            failure = commands.Failure(message=error.message, retryable=False)
            fail = commands.Fail(fence=fence, failure=failure)
            await self.apply(fail, completion.actor, completion.usage)
            return
        if completion.usage is not None and result.is_stored:
            count_in_metrics(completion.usage)
        if result.cascade is not None:
            self._core.send_cascade_hints(result.cascade)
        if result.lanes:
            self._core.wakeups.notify([f"lane:{lane}" for lane in result.lanes])
        if not result.is_stored:
            # The fast path did not match the row: the model decides, or raises the error.
            await self._apply_with_usage(completion.command, completion.workspace, completion.actor)

    async def _apply_with_usage(
        self,
        command: commands.AttemptCommand,
        workspace: UUID,
        actor: str | None,
        usage: Usage | None = None,
    ) -> TaskChange | None:
        """Applies a command and records the usage in one transaction; `None` if repeated."""
        task = command.fence.task
        first = None
        if usage is not None:
            first = partial(record_usage, self._core, workspace, command.fence, usage, at_end=True)
        return await self._core.apply_command(
            task, command, workspace=workspace, actor=actor, first=first
        )

    def _complete_watched_script(self, completions: list[_Completion]) -> Script[Answers]:
        """Completes watched tasks, and tasks with usage, with one cascade; returns the results."""
        unwatched = yield from self._complete_with_usage(completions)
        rows = yield self._completion_statement("complete_watched", completions)
        cascade = self._core.new_cascade(completions[0].actor, strict=True)
        yield from cascade.run(
            FinishedTask(row["id"], row["workspace"], Status.COMPLETED, row)
            for row in sorted(rows, key=lambda row: row["id"].int)
        )
        stored = {row["id"] for row in rows} | unwatched
        answers = [
            _CompletionResult(completion.command.fence.task in stored) for completion in completions
        ]
        answers[0] = _CompletionResult(answers[0].is_stored, cascade)
        return answers

    def _chained_script_factory(
        self, completion: _Completion
    ) -> Callable[[], Script[_CompletionResult | None]] | None:
        """Returns a script that completes a task and activates the next; `None`: needs a cascade.

        The script consists of one statement.
        """
        if completion.snapshot is None or completion.usage is not None:
            return None
        chained = self._core.chained_completion(
            completion.command.fence.task, completion.snapshot, completion.actor
        )
        return None if chained is None else partial(self._chained_script, completion, chained)

    def _chained_script(
        self, completion: _Completion, chained: ChainedCompletion
    ) -> Script[_CompletionResult | None]:
        """Completes the task by `chained`; returns `None`, doing nothing, if no row matched."""
        fence, result_row = completion.command.fence, _result_row(completion)
        params = {
            "id": fence.task,
            "attempt": fence.attempt,
            "token": token_hash(fence.token),
            "workspace": completion.workspace,
            "now": self._core.now(),
        }
        rows = yield chained.statement(params, [] if result_row is None else [result_row])
        if not rows:
            return None
        woken_lanes = {row["lane"] for row in rows if row.get("status") == Status.PENDING}
        return _CompletionResult(is_stored=True, lanes=woken_lanes | chained.lanes)

    def _complete_with_usage(self, completions: list[_Completion]) -> Script[set[UUID]]:
        """Records sent usage and completes its unwatched tasks; returns the ids of these tasks."""
        with_usage = []
        for completion in completions:
            if completion.usage is not None:
                yield from record_usage(
                    self._core,
                    self._workspace,
                    completion.command.fence,
                    completion.usage,
                    at_end=True,
                )
                with_usage.append(completion)
        if not with_usage:
            return set()
        rows = yield self._completion_statement("complete_if_owned", with_usage)
        return {row["id"] for row in rows}

    def _complete_plain_script(self, completions: list[_Completion]) -> Script[Answers]:
        """Completes unwatched tasks; returns for each completion if it was stored."""
        rows = yield self._completion_statement("complete_if_owned", completions)
        if len(rows) == len(completions):
            return [True] * len(completions)
        stored = {row["id"] for row in rows}
        return [completion.command.fence.task in stored for completion in completions]

    def _completion_statement(self, query: str, completions: list[_Completion]) -> Statement:
        """Returns the statement that completes these tasks, in task order, with their results."""
        fences = []
        result_rows = []
        for completion in sorted(completions, key=lambda item: item.command.fence.task.int):
            fence = completion.command.fence
            fences.append((fence.task, fence.attempt, token_hash(fence.token)))
            if (row := _result_row(completion)) is not None:
                result_rows.append(row)
        params = {"now": self._core.now(), "workspace": self._workspace}
        return Statement(query, params, {"done": fences, "result": result_rows})

    async def apply(
        self, command: commands.AttemptCommand, actor: str | None, usage: Usage | None = None
    ) -> TaskChange | None:
        """Applies any other command of an attempt (fail, park, begin, ...); `None` for a repeat.

        Also records the usage. Raises `Conflict` if the attempt does not own the task.
        """
        check_report(command)
        _check_usage(usage)
        if any(getattr(command, field, None) is not None for field in REPORTED_TEXT_FIELDS):
            command = redact_command(command, await self._task_secrets.redactor(command.fence))
        change = await self._apply_with_usage(command, self._workspace, actor, usage)
        if usage is not None and change is not None:
            count_in_metrics(usage)
        if not isinstance(command, commands.Begin):
            self._core.known_attempts.evict(command.fence.task)
        return change

    async def redact_receipt(self, fence: Fence, receipt: dict[str, Any]) -> dict[str, Any]:
        """Returns a receipt without the task's secret values."""
        bounds.to_json_text("receipt", receipt)
        redactor = await self._task_secrets.redactor(fence)
        redacted: dict[str, Any] = redactor.redact_value(receipt)
        return redacted


def _result_row(completion: _Completion) -> tuple[Any, ...] | None:
    """Returns the row with output and summary; `None` if the attempt has neither."""
    command = completion.command
    if command.output is None and command.summary is None:
        return None
    return command.fence.task, completion.workspace, command.output, command.summary


def _check_usage(usage: Usage | None) -> None:
    """Raises `Invalid` for a usage out of its bounds."""
    if usage is not None:
        check_usage(usage)
