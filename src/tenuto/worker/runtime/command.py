"""Commands as sessions under the supervisor: a task's own argv, or the agent's command.

The command gets its task in the environment (`TENUTO_TASK_ID`, `TENUTO_ATTEMPT`, `TENUTO_INPUT`,
`TENUTO_CHECKPOINT`, `TENUTO_PREVIOUS`, `TENUTO_IDEMPOTENCY_KEY`), and the prompt, or without one
the input, on standard input. It may write JSON lines to file descriptor 3:

    {"progress": 40, "step": "compiling"}   {"checkpoint": {...}}   {"output": {...}}
    {"error": {"message": "...", "class": "rate_limit", "retryable": true,
               "resume_at": "2027-01-01T00:00:00Z"}}   {"log": "text"}
"""

import asyncio
import codecs
import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from tenuto.crash_points import crash_point
from tenuto.model.bounds import MAX_JSON
from tenuto.model.errors import Invalid, TenutoError
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.environment import Allowed
from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tenancy.redact import Redactor
from tenuto.worker.capacity import SessionCapacity
from tenuto.worker.context import Context
from tenuto.worker.runtime.environment import allowed_environment, resolve_folder
from tenuto.worker.runtime.protocol import AttemptFailed, CannotStart, RuntimeContext
from tenuto.worker.session import Session, SessionEnd, SpawnError, Supervisor

_INHERITED_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
)
_MAX_ENV_CHARS = 32_000
_READ_BYTES = 65_536
_MAX_CHARACTER_BYTES = 4
_Decoder = codecs.getincrementaldecoder("utf-8")
_TAIL_LINES = 20
_MAX_REPORT_BYTES = 2 * MAX_JSON
_DRAIN_CHECK_S = 0.2
_DRAIN_CHECKS = 5
"""Checks at which all readers wait, after the session's end, before they are given up.

Together they take less than the two seconds that the heartbeat adds to an attempt's grace time.
"""


class _CommandReport:
    """Output and error that a command has reported over its report pipe."""

    def __init__(self) -> None:
        self.output: Any = None
        self.error: Any = None


class _Pipe:
    """A pipe with one reader."""

    def __init__(self, source: asyncio.StreamReader) -> None:
        self._source = source
        self.is_waiting = False
        """True if the reader has read all data so far and waits for more."""

    async def read(self) -> bytes:
        """Returns the next bytes; empty at the end."""
        self.is_waiting = True
        chunk = await self._source.read(_READ_BYTES)
        self.is_waiting = False
        return chunk


class CommandRuntime:
    """Runs commands. `command` is the agent's own, for tasks without a command.

    `allowed` is what the worker's owner lets tasks set, for both kinds of command.
    """

    name = "command"
    task_types: tuple[str, ...] | None = None

    def __init__(
        self, supervisor: Supervisor, command: Sequence[str] | None, allowed: Allowed
    ) -> None:
        self._supervisor = supervisor
        self._command = resolve_program(command) if command else None
        self._absolute_command = (
            [make_path_absolute(argument) for argument in self._command] if self._command else None
        )
        """The agent's command with absolute paths, for tasks that choose the folder."""
        self._allowed = allowed
        self._capacity = SessionCapacity()

    def free_sessions(self, busy: int) -> int | None:
        """Returns how many sessions can start beside `busy`: 0 or 1, reserved, after a failure."""
        return self._capacity.free_sessions(busy)

    def release_reservation(self) -> None:
        """Releases what `free_sessions` reserved, because no task was claimed for it."""
        self._capacity.release_reservation()

    async def run(self, context: Context, grace_s: float, receipt: dict[str, Any]) -> Any:
        """Returns the command's output; raises `AttemptFailed` or `CannotStart`.

        If cancelled: kills the command after at most `grace_s`, records how in `receipt`, and
        re-raises.
        """
        try:
            session = await self._spawn(context)
        except asyncio.CancelledError:
            # Its control socket closes with the spawn: whatever had started is killed.
            receipt |= {"state": "killed", "how": "while it was starting", "killed_count": 0}
            raise
        self._capacity.on_started()
        crash_point("worker.session_spawned")
        report = _CommandReport()
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        out, err, report_pipe = map(_Pipe, (session.stdout, session.stderr, session.report))
        readers = {
            asyncio.ensure_future(_copy_to_transcript(out, "INFO", context, tail)): out,
            asyncio.ensure_future(_copy_to_transcript(err, "WARN", context, tail)): err,
            asyncio.ensure_future(_read_report_pipe(report_pipe, context, report)): report_pipe,
        }
        try:
            end = await session.wait()
            await _drain(session, readers, context)
            await asyncio.gather(*readers)
        except asyncio.CancelledError:
            context.stopping = True  # reports are not retried then if the store is away
            grace_s = min(grace_s, context.longest_grace_s)
            end = await asyncio.shield(session.kill(grace_s))
            await _drain(session, readers, context)
            await asyncio.gather(*readers, return_exceptions=True)
            receipt |= {"state": "killed", **end.receipt}
            raise
        finally:
            session.drop()
        return _output_or_raise(end, report, tail)

    async def _spawn(self, context: Context) -> Session:
        """Starts the task's command, else the agent's; `CannotStart` also updates the capacity."""
        work = context.work
        text = work.prompt if work.prompt is not None else msgspec.json.encode(work.input).decode()
        stdin = text if work.prompt is not None or work.input is not None else ""
        try:
            folder = resolve_folder(work.env, work.cwd, self._allowed)
        except Invalid as error:
            self._capacity.on_started()  # not the fault of the machine: the task is not allowed
            raise CannotStart(_invalid_input_failure(error.message)) from error
        argv = work.command or (self._command if folder is None else self._absolute_command)
        assert argv, "an agent without a command can only match tasks with a command"
        try:
            return await self._supervisor.spawn(
                argv,
                cwd=folder,
                env=build_environment(context, os.environ),
                stdin=stdin.encode("utf-8", "replace"),
            )
        except SpawnError as error:
            is_temporary = error.code == "spawn_failed"
            if is_temporary:
                self._capacity.on_start_failed()
            else:
                self._capacity.on_started()  # not the fault of the machine: the command cannot run
            message = f"cannot run {argv[0]}: {error}"
            raise CannotStart(
                Failure(message=message, error_class=ErrorClass.CRASH)
                if is_temporary
                else _invalid_input_failure(message)
            ) from error


def create(context: RuntimeContext) -> CommandRuntime:
    """Creates the runtime of commands, with the agent's own command if it has one."""
    allowed = allowed_environment(context.settings)
    return CommandRuntime(context.supervisor, context.command, allowed)


def resolve_program(command: Sequence[str]) -> list[str]:
    """Returns the command with its program's absolute path; a bare name not on PATH stays."""
    program, *arguments = command
    path = shutil.which(program) or program
    if os.sep in path:
        path = os.path.abspath(path)  # noqa: PTH100  links in it are the owner's choice
    return [path, *arguments]


def make_path_absolute(argument: str) -> str:
    """Returns the argument with the path in it made absolute, if a file or folder has this path.

    The argument is `PATH` or `--option=PATH`. A task that chooses the folder in which a command
    runs must not thereby choose the files that the command uses. A path of only dots and slashes,
    such as the working folder itself, stays.
    """
    option, equals, name = argument.rpartition("=")
    if not name.strip("./") or not os.path.lexists(name):
        return argument
    return f"{option}{equals}{os.path.abspath(name)}"  # noqa: PTH100  links are the owner's choice


def _invalid_input_failure(message: str) -> Failure:
    """Returns a failure without retry: no other attempt could start the task either."""
    return Failure(message=message, error_class=ErrorClass.INVALID_INPUT, retryable=False)


def build_environment(context: Context, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the command's variables: some inherited, the task's own, its data unless too long."""
    work = context.work
    env = {name: inherited[name] for name in _INHERITED_VARIABLES if name in inherited}
    if "PATH" in env:
        # Relative entries would be looked up in the working folder, which the task chooses.
        absolute = filter(os.path.isabs, env["PATH"].split(os.pathsep))
        env["PATH"] = os.pathsep.join(absolute)
    env |= work.env
    env |= {
        "TENUTO_TASK_ID": str(context.task_id),
        "TENUTO_ATTEMPT": str(context.attempt),
        "TENUTO_IDEMPOTENCY_KEY": context.idempotency_key,
        "TENUTO_REPORT_FD": "3",
    }
    values = {
        "TENUTO_INPUT": work.input,
        "TENUTO_CHECKPOINT": work.checkpoint,
        "TENUTO_PREVIOUS": work.previous,
    }
    for name, value in values.items():
        text = msgspec.json.encode(value).decode()
        if value is not None and len(text) <= _MAX_ENV_CHARS:
            env[name] = text
    return env


async def _drain(
    session: Session, readers: Mapping["asyncio.Task[None]", _Pipe], context: Context
) -> None:
    """Waits until the ended session's output is read; gives up if another process keeps it open.

    All output is in the pipes by then: a reader that still waits has a pipe that a process outside
    the tree keeps open. Several checks are needed, because before a single one the event loop may
    have been too busy to read.
    """
    pending, checks = set(readers), 0
    while pending and checks < _DRAIN_CHECKS:
        _, pending = await asyncio.wait(pending, timeout=_DRAIN_CHECK_S)
        checks += all(readers[reader].is_waiting for reader in pending)
    if pending:
        context.log(
            "(another process keeps the command's output open: the rest is not read)", "WARN"
        )
        session.drop()
        await asyncio.wait(pending)


async def _copy_to_transcript(pipe: _Pipe, level: str, context: Context, tail: deque[str]) -> None:
    """Copies the command's output to the transcript, line by line; `tail` gets the last lines."""
    rest = b""
    while chunk := await pipe.read():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _READ_BYTES:
            line, rest = _split_long_line(rest, context.redactor)
            lines += [line] if line else []
        for line in lines[-_TAIL_LINES:] if context.is_full else lines:
            _log_line(line, level, context, tail)
    if rest:
        _log_line(rest, level, context, tail)


def _split_long_line(rest: bytes, redactor: Redactor) -> tuple[bytes, bytes]:
    """Returns the part of a long line to log now, and the rest; splits no secret or character."""
    if not redactor.max_variant_length:
        decoder = _Decoder("replace")
        decoder.decode(rest[-_MAX_CHARACTER_BYTES:])
        incomplete, _ = decoder.getstate()
        return rest[: len(rest) - len(incomplete)], incomplete
    text = rest.decode("utf-8", "surrogateescape")
    line = text[: redactor.safe_cut_position(text)].encode("utf-8", "surrogateescape")
    return line, rest[len(line) :]


def _log_line(line: bytes, level: str, context: Context, tail: deque[str]) -> None:
    """Adds a line of output to the transcript and to `tail`."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    tail.append(text)
    context.log(text, level)


async def _read_report_pipe(pipe: _Pipe, context: Context, report: _CommandReport) -> None:
    """Applies the command's reports until the pipe ends; logs an invalid one, raises nothing."""
    rest = bytearray()
    is_dropping = False
    while chunk := await pipe.read():
        first, *more = chunk.split(b"\n")
        if not is_dropping:
            rest += first
        if len(rest) > _MAX_REPORT_BYTES:
            context.log(
                f"unreadable report: a line of more than {_MAX_REPORT_BYTES:,} bytes", "WARN"
            )
            rest, is_dropping = bytearray(), True
        if more:
            await _apply_report_line(bytes(rest), context, report)
            for line in more[:-1]:
                await _apply_report_line(line, context, report)
            rest, is_dropping = bytearray(more[-1]), False
    if rest:
        await _apply_report_line(bytes(rest), context, report)


async def _apply_report_line(line: bytes, context: Context, report: _CommandReport) -> None:
    """Parses one line; sets output and error in `report` and passes other keys to the context."""
    if not line.strip():
        return
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        context.log(f"unreadable report: {error}", "WARN")
        return
    # First, because they decide how the attempt ends, even if another key of the line fails.
    report.output = fields.get("output", report.output)
    report.error = fields.get("error", report.error)
    for key, value in fields.items():
        await _try_report_key(key, value, context)


async def _try_report_key(key: str, value: Any, context: Context) -> None:
    """Applies one key of a report; logs every error, so that the other keys are still applied."""
    try:
        await _apply_report_key(key, value, context)
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        context.log(f"unreadable report: {error}", "WARN")
    except TenutoError as error:
        context.log(f"report refused: {error}", "WARN")
    except Exception as error:  # noqa: BLE001  no report may lose a session's outcome
        context.log(f"report failed: {error!r}", "WARN")


async def _apply_report_key(key: str, value: Any, context: Context) -> None:
    """Passes one key of a report to the context; ignores unknown keys."""
    match key:
        case "progress":
            await context.progress(value)
        case "step":
            await context.progress(None, value)
        case "checkpoint":
            await context.save(value)
        case "usage":
            await context.used(**_parse_usage(value))
        case "log":
            context.log(str(value))


def _parse_usage(value: Any) -> dict[str, Any]:
    """Parses reported usage, without `number`: the worker numbers the reports itself."""
    fields = msgspec.structs.asdict(msgspec.convert(value, Usage))
    del fields["number"]
    return fields


def _output_or_raise(end: SessionEnd, report: _CommandReport, tail: deque[str]) -> Any:
    """Returns a successful command's output (its exit code if none), or raises `AttemptFailed`."""
    if end.exit_code == 0 and report.error is None:
        return report.output if report.output is not None else {"exitCode": 0}
    raise AttemptFailed(_build_failure(end, report, tail), _parse_resume_at(report))


def _parse_resume_at(report: _CommandReport) -> datetime | None:
    """Returns the reported `resume_at`; `None` if it is missing, invalid or without time zone."""
    value = report.error.get("resume_at") if isinstance(report.error, dict) else None
    try:
        at = msgspec.convert(value, datetime)
    except msgspec.ValidationError:
        return None
    return at if at.tzinfo is not None else None


def _build_failure(end: SessionEnd, report: _CommandReport, tail: deque[str]) -> Failure:
    """Builds the failure from the command's end; the class and message it reported win."""
    reported = report.error if isinstance(report.error, dict) else {"message": report.error}
    if end.oom:
        error_class, reason = ErrorClass.OUT_OF_MEMORY, "killed because it ran out of memory"
    elif end.exit_code is None:
        error_class, reason = ErrorClass.CRASH, f"killed by signal {end.signal}"
    else:
        error_class, reason = ErrorClass.ERROR, f"exit code {end.exit_code}"
    if reported.get("class") in [member.value for member in ErrorClass]:
        error_class = ErrorClass(reported["class"])
    last_line = next((line for line in reversed(tail) if line.strip()), "")
    message = str(reported.get("message") or (f"{reason}: {last_line}" if last_line else reason))
    retryable = reported.get("retryable")
    return Failure(
        message=message,
        error_class=error_class,
        retryable=retryable if isinstance(retryable, bool) else None,
        exit_code=end.exit_code,
    )
