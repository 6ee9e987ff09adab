"""What people type: lengths of time, instants, JSON, names with values, filters."""

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


class Finite(click.FloatRange):
    """A number within its range; what is not a number is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if found != found:  # noqa: PLR0124  only what is not a number differs from itself
            self.fail(f"{value!r} is not a number", param, ctx)
        return found


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)?", re.ASCII)


def parse_span(text: str) -> timedelta | None:
    """The length of time in `90`, `10m`, `1h30m`, `2d`; `None` when it is none."""
    found = _SPAN.findall(text)
    if len(found) > 1 and not all(unit for _, unit in found):
        return None  # in 1h30, only the writer knows of what the 30 are
    if not found or "".join(number + unit for number, unit in found) != text:
        return None
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in found))
    except OverflowError:
        return None


def seconds(text: str | int) -> int:
    """A length of time as whole seconds."""
    length = parse_span(str(text))
    if length is None:
        raise click.BadParameter(f"{text!r} is not a length of time like 90, 10m or 1h30m")
    return int(length.total_seconds())


def ahead(text: str) -> datetime | timedelta:
    """An instant, or with a plus a length of time from now on."""
    length = parse_span(text[1:]) if text.startswith("+") else None
    return _instant(text, "+10m") if length is None else length


def ago(text: str) -> datetime | timedelta:
    """An instant, or a length of time up to now."""
    length = parse_span(text)
    return _instant(text, "10m") if length is None else length


def _instant(text: str, example: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f"{text!r} is neither an ISO 8601 time nor like {example}"
        ) from None


def after(now: datetime, when: datetime | timedelta | None) -> datetime | None:
    """The instant that was meant, a length of time counting from now on."""
    return _shifted(now, when, 1)


def before(now: datetime, when: datetime | timedelta | None) -> datetime | None:
    """The instant that was meant, a length of time counting back from now."""
    return _shifted(now, when, -1)


def _shifted(now: datetime, when: datetime | timedelta | None, sign: int) -> datetime | None:
    if not isinstance(when, timedelta):
        return when
    try:
        return now + sign * when
    except OverflowError:
        raise click.UsageError("the time is beyond the calendar") from None


def read_file(path: str, most: int) -> bytes:
    """A file's content, or standard input's for `-`, up to one byte more than is accepted."""
    try:
        if path == "-":
            if sys.stdin is None:
                raise click.UsageError("cannot read standard input: it is closed")
            return sys.stdin.buffer.read(most + 1)
        with open(path, "rb") as file:  # noqa: PTH123  a device or pipe is welcome too
            return file.read(most + 1)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"cannot read {path}: {error}") from error


def read_text(field: str, path: str) -> str:
    """A text file's content; `Invalid` when it is too large or not UTF-8."""
    from tenuto.model import bounds
    from tenuto.model.errors import Invalid

    content = read_file(path, 4 * bounds.MAX_TEXT)
    try:
        return bounds.text(field, content.decode(), bounds.MAX_TEXT)
    except UnicodeDecodeError as error:
        raise Invalid(f"{path} is not UTF-8 text: {error}", "text_invalid") from error


def read_json(field: str, text: str) -> Any:
    """The value of JSON text, or of the file that `@path` names."""
    from tenuto.model import bounds
    from tenuto.model.errors import Invalid

    source: str | bytes = text
    if text.startswith("@"):
        source = read_file(text[1:], 2 * bounds.MAX_JSON)
        if len(source) > 2 * bounds.MAX_JSON:
            raise Invalid(
                f"{field} is larger than the {bounds.MAX_JSON:,} bytes of JSON that are accepted",
                "too_large",
            )
    return bounds.parse_json(field, source)


def read_environment(pairs: tuple[str, ...]) -> dict[str, str] | None:
    """Variables from `NAME=VALUE` words."""
    for pair in pairs:
        if "=" not in pair[1:]:
            raise click.UsageError(f"--env wants NAME=VALUE, not {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs) or None


def folder(given: str | None) -> str:
    """The folder that was named, or this one, as every process on this machine would name it."""
    try:
        return os.path.abspath(given or os.getcwd())  # noqa: PTH100, PTH109  `..` is not a link's
    except OSError as error:
        raise click.UsageError(f"this folder is gone; name one with --cwd ({error})") from error


def place_options(function: F) -> F:
    """Adds the options that say where among others a task stands; `read_place` reads them."""
    options = (
        click.option(
            "--depends-on", multiple=True, metavar="ID", help="A task to wait for; repeatable."
        ),
        click.option(
            "--blocks", multiple=True, metavar="ID", help="A task that is to wait; repeatable."
        ),
        click.option(
            "--on-dependency-failure",
            type=click.Choice(["fail", "skip", "run"]),
            help="What to do when one waited for fails; fail if not given.",
        ),
        click.option("--next", metavar="KEY", help="The definition to run when it has succeeded."),
        click.option("--group", metavar="G", help="The running group, by id or key, to join."),
        click.option("--key", metavar="KEY", help="A name that others may refer to."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def budget_options(function: F) -> F:
    """Adds the options that bound what a task may use; `read_budget` reads them."""
    for option in (
        click.option(
            "--budget-usd", type=float, metavar="USD", help="What its models may cost at most."
        ),
        click.option(
            "--budget-tokens", type=int, metavar="N", help="Tokens that its models may use at most."
        ),
    ):
        function = option(function)
    return function


def read_budget(fields: dict[str, Any]) -> "Budget | None":
    """The budget that the options say, taken out of what was given."""
    from tenuto.model.limits.budgets import Budget

    tokens, cost = fields.pop("budget_tokens"), fields.pop("budget_usd")
    return None if tokens is None and cost is None else Budget(tokens=tokens, cost_usd=cost)


def bound_options(function: F) -> F:
    """Adds the options that hold a task back; `read_bounds` reads them."""
    for option in (
        click.option(
            "--concurrency-policy",
            type=click.Choice(["queue", "cancel_old", "cancel_new"]),
            help="What to do when all places of its key are taken; queue if not given.",
        ),
        click.option(
            "--concurrency-limit", type=int, metavar="N", help="Places of its key; 1 if not given."
        ),
        click.option(
            "--concurrency-key", metavar="KEY", help="Tasks with the same key run one at a time."
        ),
    ):
        function = option(function)
    return budget_options(function)


def read_bounds(fields: dict[str, Any]) -> None:
    """Put a budget and a concurrency key in the place of the options for them."""
    from tenuto.model.limits.concurrency import Concurrency

    fields["budget"] = read_budget(fields)
    key = fields.pop("concurrency_key")
    said = {name: fields.pop(f"concurrency_{name}") for name in ("limit", "policy")}
    known = {name: value for name, value in said.items() if value is not None}
    if key is not None:
        fields["concurrency"] = Concurrency(key, **known)
    elif known:
        raise click.UsageError("--concurrency-limit and --concurrency-policy need a key")


async def read_place(engine: "AnyEngine", fields: dict[str, Any]) -> None:
    """Put the ids of other tasks in the place of what was given for them."""
    for name in ("depends_on", "blocks"):
        fields[name] = [str(await engine.find(each)) for each in fields[name]]


def filter_options(function: F) -> F:
    """Adds the options that pick tasks; `read_filter` reads them."""
    options = (
        click.option("--status", multiple=True, help="Only with this status; of several, any."),
        click.option("--tag", "tags", multiple=True, help="Only with this tag; of several, all."),
        click.option(
            "--min-priority", type=click.IntRange(1, 10), help="Only this urgent or more."
        ),
        click.option("--type", "task_type", help="Only of this type."),
        click.option("--text", help="Only with this text in the title."),
        click.option(
            "--since",
            type=ago,
            metavar="TIME",
            help="Only created since: 1h, 2d, or an ISO 8601 time.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def has_filter(chosen: dict[str, Any]) -> bool:
    return any(value not in (None, ()) for value in chosen.values())


def read_filter(now: datetime, chosen: dict[str, Any]) -> Any:
    """The engine's filter for what was chosen."""
    from tenuto.engine.tasks.query import Filter
    from tenuto.model import bounds

    if chosen["task_type"] is not None:
        bounds.text("type", chosen["task_type"], bounds.MAX_NAME)
    words = (word for given in chosen["status"] for word in given.split(","))
    return Filter(**{**chosen, "status": tuple(words), "since": before(now, chosen["since"])})
