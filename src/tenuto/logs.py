"""Logs: one line each on standard error, for people or as JSON, escaped and without secrets."""

import logging
import re
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from uuid import UUID

from tenuto import tracing
from tenuto.model.printable import encodable, indented, printable, printable_json
from tenuto.model.tenancy.redact import LEAST, MASK, Redactor, secret_variants

REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""The id of the request that is being answered."""
TASK: ContextVar[UUID | str | None] = ContextVar("task", default=None)
"""The id of the task that is being run."""

MOST_SECRETS = 1000
"""Values that are known at a time; those heard of longest ago are given up."""
STACK_MARK = "    | "
"""Begins each line of a stack, so that no text in it can be taken for a record."""
_TOKENS = re.compile(r"(?:tnt|tns)_[\w-]{8,}|whsec_[\w+/=-]{8,}|eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*")
_PASSWORD = re.compile(
    r"(postgres(?:ql)?://[^/@:\s]*:)[^\s?]*@|(://[^/@:\s]*:)[^/\s]*@|([?&](?:ssl)?password=)[^&\s]+"
)
"""A password before a host, up to the last `@`, or one among the options of an address.

In an address of PostgreSQL a password may hold a `/` that nobody escaped.
"""


class _SecretMasker:
    """The secret values that this process has opened. However many: a look at a text is short."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, set[str]] = OrderedDict()
        self._by_start: defaultdict[str, set[str]] = defaultdict(set)
        self._lock = threading.Lock()

    def keep(self, values: Iterable[str]) -> None:
        with self._lock:
            for value in values:
                if value not in self._values:
                    self._values[value] = {word[:LEAST] for word in secret_variants(value)}
                    for start in self._values[value]:
                        self._by_start[start].add(value)
                self._values.move_to_end(value)
            while len(self._values) > MOST_SECRETS:
                self._give_up(*self._values.popitem(last=False))

    def _give_up(self, value: str, starts: set[str]) -> None:
        for start in starts:
            self._by_start[start].discard(value)
            if not self._by_start[start]:
                del self._by_start[start]

    def redact(self, text: str) -> str:
        if not self._values:
            return text
        seen = {text[place : place + LEAST] for place in range(len(text) - LEAST + 1)}
        with self._lock:
            starts = seen & self._by_start.keys()
            suspects = {value for start in starts for value in self._by_start[start]}
        return Redactor(suspects).text(text) if suspects else text


_SECRETS = _SecretMasker()


def mask_in_logs(values: Iterable[str]) -> None:
    """Strike these values out of every line of the log from now on."""
    _SECRETS.keep(values)


def without_password(url: str) -> str:
    """The text with a mask for the password of each address in it."""

    def masked(found: re.Match[str]) -> str:
        database, other, option = found.groups()
        return f"{option}{MASK}" if option else f"{database or other}{MASK}@"

    return _PASSWORD.sub(masked, url)


def redact(text: str) -> str:
    """The text without known secrets, anything that looks like a token of ours, or passwords."""
    return without_password(_TOKENS.sub(MASK, _SECRETS.redact(text)))


class _RedactingFilter(logging.Filter):
    """Makes a record say what may be seen of it, before anything writes it.

    Afterwards `msg` and the fields are text without secrets, and `exc_text` holds every stack.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = _seen(_message(record)), None
        if (fields := getattr(record, "fields", None)) is not None:
            record.fields = {
                name: value if isinstance(value, bool | int | float | None) else _seen(str(value))
                for name, value in fields.items()
            }
        stacks = [record.exc_text, record.stack_info]
        if record.exc_info and not record.exc_text:
            stacks[0] = logging.Formatter().formatException(record.exc_info)
        record.exc_text = _seen("\n".join(filter(None, stacks))) or None
        record.stack_info = None
        return True


def _message(record: logging.LogRecord) -> str:
    """What the record says. An argument may be a stranger's object, whose text cannot be made."""
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001  a line of the log must not end what it is about
        where = f"{record.pathname}:{record.lineno}"
        return f"a record from {where} cannot be formatted: {type(error).__name__}"


def _seen(text: str) -> str:
    return encodable(redact(text))


class _Plain(logging.Formatter):
    """A record as one printable line; the lines of a stack follow it, each with a mark."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-8s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.message = str(record.msg)
        record.asctime = self.formatTime(record, self.datefmt)
        line = printable(self.formatMessage(record))
        if record.exc_text:
            line += f"\n{STACK_MARK}{indented(record.exc_text, STACK_MARK)}"
        return line


class _Json(logging.Formatter):
    """A record as one line of JSON, with what it belongs to where that is known."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "ts": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "message": record.msg,
            "request_id": REQUEST.get(),
            "trace_id": tracing.trace_id(),
            "task_id": None if (task := TASK.get()) is None else str(task),
            "stack": record.exc_text,
            **getattr(record, "fields", {}),
        }
        return printable_json({name: value for name, value in said.items() if value is not None})


def handler(style: str = "") -> logging.Handler:
    """What writes records to standard error: `json`, or for people."""
    made = logging.StreamHandler(sys.stderr)
    made.addFilter(_RedactingFilter())
    made.setFormatter(_Json() if style == "json" else _Plain())
    return made


def set_up(level: str = "INFO", style: str = "") -> None:
    """Send this program's log to standard error, and the warnings of libraries and of Python."""
    made = handler(style)
    ours = logging.getLogger("tenuto")
    ours.handlers[:] = [made]
    ours.setLevel(level)
    ours.propagate = False
    if not logging.root.handlers:
        logging.root.addHandler(made)
    logging.captureWarnings(capture=True)
