"""Parses arguments: durations, times, JSON, files, limits. Adds shared options."""

import os
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.model.limits.budgets import Budget

F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A float range that refuses NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Converts the number; refuses NaN, which passes every range check."""
        number = super().convert(value, param, ctx)
        if number != number:  # noqa: PLR0124  only NaN differs from itself
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)?", re.ASCII)


def parse_duration(text: str) -> timedelta | None:
    """Parses a duration like `90` (seconds), `10m`, `1h30m`, `2d`; returns `None` if invalid."""
    parts = _SPAN.findall(text)
    if len(parts) > 1 and not all(unit for _, unit in parts):
        return None  # in 1h30, the unit of 30 is unknown
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
    except OverflowError:
        return None


def parse_seconds(text: str | int) -> int:
    """Parses a duration and returns whole seconds, rounded down; else `BadParameter`."""
    duration = parse_duration(str(text))
    if duration is None:
        raise click.BadParameter(f"{text!r} is not a duration like 90, 10m or 1h30m")
    return int(duration.total_seconds())


def parse_time_or_delay(text: str) -> datetime | timedelta:
    """Parses an ISO 8601 time, or `+DURATION`: a delay from now."""
    delay = parse_duration(text[1:]) if text.startswith("+") else None
    return _parse_time(text, "+10m") if delay is None else delay


def parse_time_or_age(text: str) -> datetime | timedelta:
    """Parses an ISO 8601 time, or a duration: the age from now."""
    age = parse_duration(text)
    return _parse_time(text, "10m") if age is None else age


def _parse_time(text: str, example: str) -> datetime:
    """Parses an ISO 8601 time; the error shows `example` as the other form."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f"{text!r} is neither an ISO 8601 time nor a duration like {example}"
        ) from None


def time_after(now: datetime, when: datetime | timedelta | None) -> datetime | None:
    """Returns the time itself, now plus the duration, or `None` for `None`."""
    return _shift(now, when, 1)


def time_before(now: datetime, when: datetime | timedelta | None) -> datetime | None:
    """Returns the time itself, now minus the duration, or `None` for `None`."""
    return _shift(now, when, -1)


def _shift(now: datetime, when: datetime | timedelta | None, sign: int) -> datetime | None:
    """Returns a duration added to `now` (`sign` 1) or subtracted (-1); a time unchanged."""
    if not isinstance(when, timedelta):
        return when
    try:
        return now + sign * when
    except OverflowError:
        raise click.UsageError("the time is out of range: years 1 to 9999") from None


def read_file(path: str, max_bytes: int) -> bytes:
    """Returns up to `max_bytes` + 1 bytes of a file (`-`: standard input), or `UsageError`."""
    try:
        if path == "-":
            if sys.stdin is None:
                raise click.UsageError("cannot read standard input: it is closed")
            return sys.stdin.buffer.read(max_bytes + 1)
        with open(path, "rb") as file:  # noqa: PTH123  may be a device or pipe
            return file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"cannot read {path}: {error}") from error


def read_text(field: str, path: str) -> str:
    """Returns the content of a text file; raises `Invalid` if it is too large or not UTF-8."""
    from tenuto.model import bounds
    from tenuto.model.errors import Invalid

    content = read_file(path, 4 * bounds.MAX_TEXT)
    try:
        return bounds.check_text(field, content.decode(), bounds.MAX_TEXT)
    except UnicodeDecodeError as error:
        raise Invalid(f"{path} is not UTF-8 text: {error}", "text_invalid") from error


def read_json(field: str, text: str) -> Any:
    """Parses JSON text, or the JSON file that `@path` names."""
    from tenuto.model import bounds
    from tenuto.model.errors import Invalid

    source: str | bytes = text
    if text.startswith("@"):
        source = read_file(text[1:], 2 * bounds.MAX_JSON)
        if len(source) > 2 * bounds.MAX_JSON:
            raise Invalid(
                f"{field} is larger than {bounds.MAX_JSON:,} bytes of JSON, the maximum",
                "too_large",
            )
    return bounds.parse_json(field, source)


def read_environment(pairs: tuple[str, ...]) -> dict[str, str] | None:
    """Parses `NAME=VALUE` arguments, or raises `UsageError`; returns `None` if there are none."""
    for pair in pairs:
        if "=" not in pair[1:]:
            raise click.UsageError(f"--env must be NAME=VALUE, not {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs) or None


def absolute_folder(path: str | None) -> str:
    """Returns the absolute path of a folder, by default the current one."""
    try:
        return os.path.abspath(path or os.getcwd())  # noqa: PTH100, PTH109  resolves `..` by name
    except OSError as error:
        raise click.UsageError(
            f"the current folder was deleted; name another one with --cwd ({error})"
        ) from error


def budget_options(function: F) -> F:
    """Adds the budget options; `pop_budget` reads them."""
    for option in (
        click.option(
            "--budget-usd", type=float, metavar="USD", help="Maximum cost of the model calls."
        ),
        click.option(
            "--budget-tokens", type=int, metavar="N", help="Maximum number of model tokens."
        ),
    ):
        function = option(function)
    return function


def pop_budget(fields: dict[str, Any]) -> "Budget | None":
    """Removes the budget options from `fields` and returns the budget, or `None`."""
    from tenuto.model.limits.budgets import Budget

    tokens, cost = fields.pop("budget_tokens"), fields.pop("budget_usd")
    return None if tokens is None and cost is None else Budget(tokens=tokens, cost_usd=cost)


def limit_options(function: F) -> F:
    """Adds the concurrency and budget options; `parse_limits` reads them."""
    for option in (
        click.option(
            "--concurrency-policy",
            type=click.Choice(["queue", "cancel_old", "cancel_new"]),
            help="What to do if the key's limit is reached; default: queue.",
        ),
        click.option(
            "--concurrency-limit",
            type=int,
            metavar="N",
            help="How many tasks with this key may run at once; default: 1.",
        ),
        click.option(
            "--concurrency-key",
            metavar="KEY",
            help="Tasks with the same key share a concurrency limit.",
        ),
    ):
        function = option(function)
    return budget_options(function)


def parse_limits(fields: dict[str, Any]) -> None:
    """Replaces the options in `fields` by `budget` (or `None`) and, if given, `concurrency`.

    Raises `UsageError` for a limit or policy without a key.
    """
    from tenuto.model.limits.concurrency import Concurrency

    fields["budget"] = pop_budget(fields)
    key = fields.pop("concurrency_key")
    values = {name: fields.pop(f"concurrency_{name}") for name in ("limit", "policy")}
    chosen = {name: value for name, value in values.items() if value is not None}
    if key is not None:
        fields["concurrency"] = Concurrency(key, **chosen)
    elif chosen:
        raise click.UsageError(
            "--concurrency-limit and --concurrency-policy require --concurrency-key"
        )


async def resolve_task_ids(engine: "AnyEngine", fields: dict[str, Any]) -> None:
    """Replaces abbreviated task ids in `depends_on` and `blocks` by full ids."""
    for name in ("depends_on", "blocks"):
        fields[name] = [str(await engine.find(task)) for task in fields[name]]
