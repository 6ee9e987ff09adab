"""Commands as sessions under the supervisor: a task's own argv, or the agent's command.

The command finds its task in the environment (`TENUTO_TASK_ID`, `TENUTO_ATTEMPT`, `TENUTO_INPUT`,
`TENUTO_CHECKPOINT`, `TENUTO_PREVIOUS`, `TENUTO_IDEMPOTENCY_KEY`), the prompt or else the input on
standard input, and may write JSON lines to file descriptor 3:

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
from tenuto.worker.runtime.environment import check_place
from tenuto.worker.runtime.protocol import AttemptFailed, CannotStart
from tenuto.worker.session import Session, SessionEnd, SpawnError, Supervisor

_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR")
_ENV_LIMIT = 32_000
_CHUNK = 65_536
_LONGEST_CHARACTER = 4
_Decoder = codecs.getincrementaldecoder("utf-8")
_TAIL_LINES = 20
_REPORT_LIMIT = 2 * MAX_JSON
_LOOK_S = 0.2
_LOOKS = 5
"""How often readers are found waiting after the session's end before they are given up.

In all, less than the two seconds that the heart leaves an attempt besides its grace time.
"""


class _CommandReport:
    """What a command has told over its report pipe."""

    def __init__(self) -> None:
        self.output: Any = None
        self.error: Any = None


class _Pipe:
    """A pipe that one reader reads."""

    def __init__(self, source: asyncio.StreamReader) -> None:
        self._source = source
        self.waiting = False
        """Whether the reader has had all that came so far."""

    async def read(self) -> bytes:
        """The next piece, or nothing at the end."""
        self.waiting = True
        piece = await self._source.read(_CHUNK)
        self.waiting = False
        return piece


class CommandRuntime:
    """Runs commands. `own` is the agent's command for tasks that bring none.

    `allowed` is what the worker's owner lets tasks set, whichever of the two commands runs.
    """

    name = "command"

    def __init__(self, supervisor: Supervisor, own: Sequence[str] | None, allowed: Allowed) -> None:
        self._supervisor = supervisor
        self._own = found_program(own) if own else None
        self._own_elsewhere = [fixed(word) for word in self._own] if self._own else None
        """The worker's own command for tasks that choose the folder."""
        self._allowed = allowed
        self._room = SessionCapacity()

    def free_sessions(self, busy: int) -> int | None:
        return self._room.left(busy)

    def release_reservation(self) -> None:
        self._room.release_reservation()

    async def run(self, context: Context, grace_s: float, receipt: dict[str, Any]) -> Any:
        try:
            session = await self._spawn(context)
        except asyncio.CancelledError:
            # Its control socket closes with the spawn: whatever had begun is killed.
            receipt |= {"state": "killed", "how": "while it was starting", "killed_count": 0}
            raise
        self._room.started()
        crash_point("worker.session_spawned")
        report = _CommandReport()
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        out, err, told = map(_Pipe, (session.stdout, session.stderr, session.report))
        readers = {
            asyncio.ensure_future(_follow(out, "INFO", context, tail)): out,
            asyncio.ensure_future(_follow(err, "WARN", context, tail)): err,
            asyncio.ensure_future(_read_report_pipe(told, context, report)): told,
        }
        try:
            end = await session.wait()
            await _drain(session, readers, context)
            await asyncio.gather(*readers)
        except asyncio.CancelledError:
            context.stopping = True  # a report is not insisted on then while the store is away
            grace_s = min(grace_s, context.longest_grace_s)
            end = await asyncio.shield(session.kill(grace_s))
            await _drain(session, readers, context)
            await asyncio.gather(*readers, return_exceptions=True)
            receipt |= {"state": "killed", **end.receipt}
            raise
        finally:
            session.drop()
        return _result(end, report, tail)

    async def _spawn(self, context: Context) -> Session:
        work = context.work
        told = work.prompt if work.prompt is not None else msgspec.json.encode(work.input).decode()
        stdin = told if work.prompt is not None or work.input is not None else ""
        try:
            folder = check_place(work.env, work.cwd, self._allowed)
        except Invalid as error:
            self._room.started()  # the machine could: it is the task that may not
            raise CannotStart(_refused(error.message)) from error
        argv = work.command or (self._own if folder is None else self._own_elsewhere)
        assert argv, "matching gives an agent without a command only tasks that bring one"
        try:
            return await self._supervisor.spawn(
                argv,
                cwd=folder,
                env=environment(context, os.environ),
                stdin=stdin.encode("utf-8", "replace"),
            )
        except SpawnError as error:
            temporary = error.code == "spawn_failed"
            if temporary:
                self._room.failed()
            else:
                self._room.started()  # the machine could: it is the command that cannot run
            message = f"cannot run {argv[0]}: {error}"
            raise CannotStart(
                Failure(message=message, error_class=ErrorClass.CRASH)
                if temporary
                else _refused(message)
            ) from error


def found_program(own: Sequence[str]) -> list[str]:
    """Returns the command with its program as an absolute path, found by the worker's PATH."""
    program, *words = own
    found = shutil.which(program) or program
    if os.sep in found:
        found = os.path.abspath(found)  # noqa: PTH100  links in it are the owner's choice
    return [found, *words]


def fixed(word: str) -> str:
    """Returns the word with what it names in the worker's folder as an absolute path.

    `NAME` and `--option=NAME` do. A task that chooses the folder in which a command runs must not
    choose what it runs by that. A word of dots is the working folder itself, and is left.
    """
    option, equals, name = word.rpartition("=")
    if not name.strip("./") or not os.path.lexists(name):
        return word
    return f"{option}{equals}{os.path.abspath(name)}"  # noqa: PTH100  links are the owner's choice


def _refused(message: str) -> Failure:
    """The failure of a task that no other attempt could start either."""
    return Failure(message=message, error_class=ErrorClass.INVALID_INPUT, retryable=False)


def environment(context: Context, outer: Mapping[str, str]) -> dict[str, str]:
    """What a command sees: a scrubbed environment, the task's own variables, and its task."""
    work = context.work
    env = {name: outer[name] for name in _INHERITED if name in outer}
    if "PATH" in env:
        # Other entries are looked up in the working folder, which the task chooses.
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
        if value is not None and len(text) <= _ENV_LIMIT:
            env[name] = text
    return env


async def _drain(
    session: Session, readers: Mapping["asyncio.Task[None]", _Pipe], context: Context
) -> None:
    """Wait until the readers of an ended session have all that its command wrote.

    That is in the pipes by then: a reader that still waits, waits for a process outside the tree
    that holds its pipe open. Several looks, because one alone may follow a time in which the loop
    could not read.
    """
    left, looks = set(readers), 0
    while left and looks < _LOOKS:
        _, left = await asyncio.wait(left, timeout=_LOOK_S)
        looks += all(readers[reader].waiting for reader in left)
    if left:
        context.log("(another process holds the command's output open: not read further)", "WARN")
        session.drop()
        await asyncio.wait(left)


async def _follow(pipe: _Pipe, level: str, context: Context, tail: deque[str]) -> None:
    """Write what the command prints to the transcript, line by line."""
    rest = b""
    while chunk := await pipe.read():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _CHUNK:
            line, rest = _cut(rest, context.redactor)
            lines += [line] if line else []
        for line in lines[-_TAIL_LINES:] if context.is_full else lines:
            _log_line(line, level, context, tail)
    if rest:
        _log_line(rest, level, context, tail)


def _cut(rest: bytes, redactor: Redactor) -> tuple[bytes, bytes]:
    """A line too long to wait for its end in two parts, no secret and no character cut in two."""
    if not redactor.reach:
        decoder = _Decoder("replace")
        decoder.decode(rest[-_LONGEST_CHARACTER:])
        begun, _ = decoder.getstate()
        return rest[: len(rest) - len(begun)], begun
    text = rest.decode("utf-8", "surrogateescape")
    line = text[: redactor.cut(text)].encode("utf-8", "surrogateescape")
    return line, rest[len(line) :]


def _log_line(line: bytes, level: str, context: Context, tail: deque[str]) -> None:
    text = line.decode("utf-8", "replace").rstrip("\r")
    tail.append(text)
    context.log(text, level)


async def _read_report_pipe(pipe: _Pipe, context: Context, report: _CommandReport) -> None:
    """Do what the command asks for over its report pipe; nonsense is logged, never fatal."""
    rest = bytearray()
    dropping = False
    while chunk := await pipe.read():
        first, *more = chunk.split(b"\n")
        if not dropping:
            rest += first
        if len(rest) > _REPORT_LIMIT:
            context.log(f"unreadable report: a line of more than {_REPORT_LIMIT:,} bytes", "WARN")
            rest, dropping = bytearray(), True
        if more:
            await _apply_report_line(bytes(rest), context, report)
            for line in more[:-1]:
                await _apply_report_line(line, context, report)
            rest, dropping = bytearray(more[-1]), False
    if rest:
        await _apply_report_line(bytes(rest), context, report)


async def _apply_report_line(line: bytes, context: Context, report: _CommandReport) -> None:
    if not line.strip():
        return
    try:
        said = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        context.log(f"unreadable report: {error}", "WARN")
        return
    # First, because they decide how the attempt ends, whatever becomes of the rest of the line.
    report.output = said.get("output", report.output)
    report.error = said.get("error", report.error)
    for key, value in said.items():
        await _try(key, value, context)


async def _try(key: str, value: Any, context: Context) -> None:
    """Do what one key of a report asks for; what is refused is logged and hurts no other key."""
    try:
        await _apply_report_key(key, value, context)
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        context.log(f"unreadable report: {error}", "WARN")
    except TenutoError as error:
        context.log(f"report refused: {error}", "WARN")
    except Exception as error:  # noqa: BLE001  no report may lose a session's outcome
        context.log(f"report failed: {error!r}", "WARN")


async def _apply_report_key(key: str, value: Any, context: Context) -> None:
    match key:
        case "progress":
            await context.progress(value)
        case "step":
            await context.progress(None, value)
        case "checkpoint":
            await context.save(value)
        case "usage":
            await context.used(**_usage(value))
        case "log":
            context.log(str(value))


def _usage(said: Any) -> dict[str, Any]:
    """What a command says it used; its reports are numbered here."""
    fields = msgspec.structs.asdict(msgspec.convert(said, Usage))
    del fields["number"]
    return fields


def _result(end: SessionEnd, report: _CommandReport, tail: deque[str]) -> Any:
    if end.exit_code == 0 and report.error is None:
        return report.output if report.output is not None else {"exitCode": 0}
    raise AttemptFailed(_failure(end, report, tail), _resume_at(report))


def _resume_at(report: _CommandReport) -> datetime | None:
    """When a limit that the command met is over, if it told."""
    told = report.error.get("resume_at") if isinstance(report.error, dict) else None
    try:
        at = msgspec.convert(told, datetime)
    except msgspec.ValidationError:
        return None
    return at if at.tzinfo is not None else None


def _failure(end: SessionEnd, report: _CommandReport, tail: deque[str]) -> Failure:
    said = report.error if isinstance(report.error, dict) else {"message": report.error}
    if end.oom:
        kind, why = ErrorClass.OUT_OF_MEMORY, "killed for want of memory"
    elif end.exit_code is None:
        kind, why = ErrorClass.CRASH, f"killed by signal {end.signal}"
    else:
        kind, why = ErrorClass.ERROR, f"exit code {end.exit_code}"
    if said.get("class") in [each.value for each in ErrorClass]:
        kind = ErrorClass(said["class"])
    last = next((line for line in reversed(tail) if line.strip()), "")
    message = str(said.get("message") or (f"{why}: {last}" if last else why))
    retryable = said.get("retryable")
    return Failure(
        message=message,
        error_class=kind,
        retryable=retryable if isinstance(retryable, bool) else None,
        exit_code=end.exit_code,
    )
