"""Every log call of the source with hostile text: one record each, and no forged line."""

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tests.observability.hostile import HIDDEN, RECORD, SURROGATE
from tests.observability.test_http import Lines

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tenuto"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
PAST_THE_LOG = re.compile(
    r"logging\.(debug|info|warning|error|exception|critical|log|basicConfig)"
    r"|sys\.(stdout|stderr)\.write|traceback\.print_\w+|warnings\.warn|print"
)
MAY_PRINT = ("cli/", "bench/")
"""Programs for people; their own tests look at what they print."""
ALONE = "worker/supervisor.py"
"""Runs without this package, and answers its parent on a socket."""
_PLACE = re.compile(r"%(?:\.\d+)?([sdgrf])")


class Call(NamedTuple):
    """A log call: where it is, its logger, and what it is given first."""

    place: str
    logger: str | None
    method: str
    template: str | None
    arguments: int


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())


def loggers(tree: ast.Module) -> dict[str, str | None]:
    """The loggers of a module by the names that they have there."""
    result: dict[str, str | None] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        if ast.unparse(node.value.func).endswith("getLogger"):
            name = node.value.args[0] if node.value.args else None
            text = name.value if isinstance(name, ast.Constant) else None
            for target in node.targets:
                result[ast.unparse(target)] = str(text) if text else None
    return result


def calls_in(position: str, tree: ast.Module) -> Iterator[Call]:
    existing = loggers(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = ast.unparse(node.func.value)
        if node.func.attr in LEVELS and (owner in existing or "getLogger" in owner):
            words = node.args[1:] if node.func.attr == "log" else node.args
            first = words[0] if words else None
            text = first.value if isinstance(first, ast.Constant) else None
            template = text if isinstance(text, str) else None
            where = f"{position}:{node.lineno}"
            yield Call(where, existing.get(owner), node.func.attr, template, len(words) - 1)


CALLS = [call for path, tree in trees() for call in calls_in(path, tree)]


def faults(call: Call) -> list[str]:
    """Returns the parts of a log call that avoid the escaping or this test."""
    matches = []
    if call.logger is None or call.logger.partition(".")[0] != "tenuto":
        matches.append(f"{call.place}: the logger must be a named one below `tenuto`")
    if call.template is None:
        matches.append(f"{call.place}: the message must be a constant; give values as arguments")
    elif len(_PLACE.findall(call.template)) != call.arguments:
        matches.append(f"{call.place}: {call.arguments} arguments for {call.template!r}")
    return matches


@pytest.mark.parametrize(
    "bad",
    [
        'import logging\nlog = logging.getLogger("other")\nlog.info("x")',
        "import logging\nlog = logging.getLogger(__name__)\nlog.info('x')",
        'import logging\nlogging.getLogger("tenuto").info("x")',
        'import logging\nlog = logging.getLogger("tenuto")\nlog.info(f"{x}")',
        'import logging\nlog = logging.getLogger("tenuto")\nlog.warning(text, 1)',
        'import logging\nlog = logging.getLogger("tenuto")\nlog.log(20, "a" + b)',
        'import logging\nlog = logging.getLogger("tenuto")\nlog.error("%s")',
    ],
)
def test_uncheckable_log_call_is_detected(bad: str) -> None:
    [call] = calls_in("bad.py", ast.parse(bad))
    assert faults(call)


def test_every_log_call_names_its_logger_and_a_constant_message() -> None:
    assert len(CALLS) > 60
    assert [fault for call in CALLS for fault in faults(call)] == []


def test_output_of_the_source_goes_through_the_log() -> None:
    assert [
        f"{position}:{node.lineno} {ast.unparse(node.func)}"
        for position, tree in trees()
        if not position.startswith(MAY_PRINT) and position != ALONE
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and PAST_THE_LOG.fullmatch(ast.unparse(node.func))
    ] == []


def log_call(call: Call, text: str) -> None:
    """Call the logger as the source does, with the text wherever text can come."""
    assert call.logger is not None
    assert call.template is not None
    values = [7 if kind in "dgf" else text for kind in _PLACE.findall(call.template)]
    log = logging.getLogger(call.logger)
    fields = {"fields": {"actor": text}} if call.logger == "tenuto.access" else None
    if call.method == "log":
        log.log(logging.CRITICAL, call.template, *values, extra=fields)
        return
    try:
        raise ValueError(text)
    except ValueError:
        getattr(log, call.method)(call.template, *values, extra=fields)


@pytest.fixture(params=["", "json"])
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    created = Lines(request.param)
    ours = logging.getLogger("tenuto")
    before = ours.level
    ours.addHandler(created)
    ours.setLevel("DEBUG")
    yield created
    ours.removeHandler(created)
    ours.setLevel(before)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.place)
def test_log_call_with_hostile_text_forges_no_line(call: Call, lines: Lines) -> None:
    log_call(call, SURROGATE)
    [output] = lines.lines
    first, *further = output.split("\n")
    assert all(line.startswith("    | ") for line in further)
    assert not any(HIDDEN.search(line) for line in (first, *further))
    if RECORD.match(first):
        return
    assert not further
    reported = msgspec.json.decode(first, type=dict[str, object])
    assert reported["logger"] == call.logger
