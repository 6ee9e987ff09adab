"""Logs: one line per record on standard error, as text or JSON, escaped and without secrets."""

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
from tenuto.model.tenancy.redact import MASK, MIN_LENGTH, Redactor, secret_variants

REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""The id of the request that is being handled."""
TASK: ContextVar[UUID | str | None] = ContextVar("task", default=None)
"""The id of the task that is being run."""

MAX_SECRETS = 1000
"""Secret values kept at a time; the value that was added longest ago is evicted."""
STACK_MARK = "    | "
"""Starts each line of a stack trace, so that no text in it can be taken for a log record."""
_TOKENS = re.compile(r"(?:tnt|tns)_[\w-]{8,}|whsec_[\w+/=-]{8,}|eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*")
_PASSWORD = re.compile(
    r"(postgres(?:ql)?://[^/@:\s]*:)[^\s?]*@|(://[^/@:\s]*:)[^/\s]*@|([?&](?:ssl)?password=)[^&\s]+"
)
"""Matches a password before a host, up to the last `@`, or one among the options of a URL.

In a PostgreSQL URL a password may contain a `/` that is not escaped.
"""


class _SecretMasker:
    """The secret values that this process has decrypted.

    Searching a text for them takes little time, however many there are.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[str, set[str]] = OrderedDict()
        self._by_start: defaultdict[str, set[str]] = defaultdict(set)
        self._lock = threading.Lock()

    def add(self, values: Iterable[str]) -> None:
        """Adds values or marks them as newest; evicts the oldest beyond `MAX_SECRETS`."""
        with self._lock:
            for value in values:
                if value not in self._values:
                    self._values[value] = {
                        variant[:MIN_LENGTH] for variant in secret_variants(value)
                    }
                    for start in self._values[value]:
                        self._by_start[start].add(value)
                self._values.move_to_end(value)
            while len(self._values) > MAX_SECRETS:
                self._evict(*self._values.popitem(last=False))

    def _evict(self, value: str, starts: set[str]) -> None:
        """Removes a value from the search index."""
        for start in starts:
            self._by_start[start].discard(value)
            if not self._by_start[start]:
                del self._by_start[start]

    def redact(self, text: str) -> str:
        """Returns the text with all known secret values masked."""
        if not self._values:
            return text
        windows = {text[at : at + MIN_LENGTH] for at in range(len(text) - MIN_LENGTH + 1)}
        with self._lock:
            starts = windows & self._by_start.keys()
            candidates = {value for start in starts for value in self._by_start[start]}
        return Redactor(candidates).redact_text(text) if candidates else text


_SECRETS = _SecretMasker()


def mask_in_logs(values: Iterable[str]) -> None:
    """Masks these values in later log records; forgets the oldest beyond `MAX_SECRETS`."""
    _SECRETS.add(values)


def without_password(url: str) -> str:
    """Returns the text with the password of each URL in it masked."""

    def mask(match: re.Match[str]) -> str:
        """Returns the match with its password masked."""
        postgres_prefix, url_prefix, option = match.groups()
        return f"{option}{MASK}" if option else f"{postgres_prefix or url_prefix}{MASK}@"

    return _PASSWORD.sub(mask, url)


def redact(text: str) -> str:
    """Returns the text without known secrets, passwords, and all that looks like our tokens."""
    return without_password(_TOKENS.sub(MASK, _SECRETS.redact(text)))


class _RedactingFilter(logging.Filter):
    """Redacts a record before any formatter sees it.

    Afterwards `msg` and the fields are text without secrets, and `exc_text` holds every stack.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Replaces the record's message, fields and stacks by redacted text; keeps every record."""
        record.msg, record.args = _redact_encodable(_format_message(record)), None
        if (fields := getattr(record, "fields", None)) is not None:
            record.fields = {
                name: value
                if isinstance(value, bool | int | float | None)
                else _redact_encodable(str(value))
                for name, value in fields.items()
            }
        stacks = [record.exc_text, record.stack_info]
        if record.exc_info and not record.exc_text:
            stacks[0] = logging.Formatter().formatException(record.exc_info)
        record.exc_text = _redact_encodable("\n".join(filter(None, stacks))) or None
        record.stack_info = None
        return True


def _format_message(record: logging.LogRecord) -> str:
    """Returns the record's text, or a note with its origin if an argument cannot be formatted."""
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001  logging must never fail its caller
        where = f"{record.pathname}:{record.lineno}"
        return f"a record from {where} cannot be formatted: {type(error).__name__}"


def _redact_encodable(text: str) -> str:
    """Returns the redacted text with only characters that can be encoded."""
    return encodable(redact(text))


class _PlainFormatter(logging.Formatter):
    """Formats a record as one printable line; stack lines follow, each with `STACK_MARK`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-8s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as a line, with its stack, if any, on further lines."""
        record.message = str(record.msg)
        record.asctime = self.formatTime(record, self.datefmt)
        line = printable(self.formatMessage(record))
        if record.exc_text:
            line += f"\n{STACK_MARK}{indented(record.exc_text, STACK_MARK)}"
        return line


class _JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, with its request, trace and task where known."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as a line of JSON, without fields that have no value."""
        fields = {
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
        return printable_json({name: value for name, value in fields.items() if value is not None})


def create_handler(style: str = "") -> logging.Handler:
    """Creates a handler for standard error: JSON for the style `json`, else plain text."""
    stream_handler = logging.StreamHandler(sys.stderr)
    stream_handler.addFilter(_RedactingFilter())
    stream_handler.setFormatter(_JsonFormatter() if style == "json" else _PlainFormatter())
    return stream_handler


def set_up(level: str = "INFO", style: str = "") -> None:
    """Sends this program's log, and the warnings of libraries and Python, to standard error."""
    stream_handler = create_handler(style)
    logger = logging.getLogger("tenuto")
    logger.handlers[:] = [stream_handler]
    logger.setLevel(level)
    logger.propagate = False
    if not logging.root.handlers:
        logging.root.addHandler(stream_handler)
    logging.captureWarnings(capture=True)
