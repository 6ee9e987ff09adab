"""Rendering: no control characters, and colours only where they are wanted."""

import json
import os
import select
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.conftest import Die
from tests.cli.orchestrate import WAIT_S, Orchestrate

from tenuto.cli import render
from tenuto.cli.parse import parse_duration
from tenuto.model.printable import indented, printable

EVIL = "\x1b]0;title\x07 \x1b[2J \x9b31m \u202egnp.exe \x7f [red]bold[/red]"
HARMFUL = [chr(code) for code in (*range(32), *range(127, 160), 0x202E, 0x2066, 0x200E, 0x2028)]


def test_every_control_character_is_escaped() -> None:
    for char in HARMFUL:
        output = printable(f"a{char}b")
        assert output.isprintable()
        assert len(output) > 3
    assert printable("naïve 日本 👩‍💻 \\x1b") == "naïve 日本 👩‍💻 \\x1b"
    assert printable("a\n\tb\r", lines=True) == "a\n\tb\\r"


@given(st.text(st.characters()))
def test_printed_text_is_escaped_and_complete(text: str) -> None:
    output = printable(text)
    assert not set(output) & set(HARMFUL)
    assert len(output) >= len(text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_printed_json_is_escaped_and_equal(text: str) -> None:
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", printed.append)
        render.print_json({"said": text})
    assert json.loads(printed[0]) == {"said": text}
    assert not set(printed[0]) & set(HARMFUL)


def test_continuation_lines_are_indented() -> None:
    assert indented("one\ntwo\n", "    ") == "one\n    two"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (9.96, "10.0s"), (59, "59s"), (60, "1m"), (3700, "1h1m"), (90000, "1d1h")],
)
def test_duration_is_printed_short(seconds: float, text: str) -> None:
    assert render.format_duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5h", 5400), ("1h30m", 5400), ("2d", 172800), ("1w", 604800), ("0", 0)],
)
def test_duration_is_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "h", "1x", "-1", " 1", "1h ", "\u0661", "1e9", "9" * 30 + "w"]
)
def test_invalid_duration_is_refused(text: str) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize(
    "words",
    [
        ["task", "list"],
        ["task", "show"],
        ["task", "status"],
        ["task", "logs"],
        ["task", "attempts"],
        ["task", "explain"],
        ["dlq", "list"],
        ["task", "status", "--follow"],
    ],
    ids=" ".join,
)
def test_untrusted_text_is_escaped_on_a_terminal(
    cli: Orchestrate, die: Die, words: list[str]
) -> None:
    dead = die(title=EVIL, output=EVIL, error=EVIL)
    answer = cli(*words, *([] if words[-1] == "list" else [dead]))
    output = answer.out + answer.err
    assert not set(output) & (set(HARMFUL) - {"\n"})
    assert "\\x1b[2J" in output
    assert json.loads(cli("task", "show", dead, "--json").out)["title"] == EVIL


def on_terminal(cli: Orchestrate, *words: str, answer: str = "", **environment: str) -> str:
    """Returns the output of a command whose standard files are a terminal."""
    master, slave = os.openpty()
    cli.environment |= environment
    process = cli.start(*words, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.write(master, answer.encode())
    output = b""
    while select.select([master], [], [], WAIT_S)[0]:
        try:
            output += os.read(master, 65536)
        except OSError:  # the last holder of the other end is gone
            break
    os.close(master)
    process.wait(WAIT_S)
    return output.decode()


def test_terminal_gets_colours_unless_disabled(cli: Orchestrate) -> None:
    cli.ok("task", "create", "--name", EVIL)
    coloured = on_terminal(cli, "task", "list")
    assert "\x1b[34mPENDING" in coloured
    assert "\\x1b[2J" in coloured
    assert "\x1b[2J" not in coloured
    assert "\x1b" not in on_terminal(cli, "task", "list", NO_COLOR="1")


def test_terminal_gets_a_progress_bar_during_follow(cli: Orchestrate, die: Die) -> None:
    dead = die(title=EVIL, output=EVIL, error=EVIL)
    output = on_terminal(cli, "task", "status", "--follow", dead)
    assert "━" in output
    assert "\x1b[2J" not in output
    assert "\x1b[31m" not in output


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["task", "retry", "--status", "DEAD"], "retry 1 task?"),
        (["dlq", "requeue", "--all"], "requeue 1 task?"),
        (["dlq", "purge"], "purge 1 task?"),
    ],
)
def test_confirmation_is_requested_before_many_tasks_change(
    cli: Orchestrate, die: Die, words: list[str], question: str
) -> None:
    die()

    def dead() -> int:
        return len(cli.json("dlq", "list")["tasks"])

    assert question in on_terminal(cli, *words, answer="n\n")
    assert dead() == 1
    output = on_terminal(cli, *words, answer="y\n")
    assert (question in output, dead()) == (True, 0)
    assert question not in on_terminal(cli, *words, "--yes")
