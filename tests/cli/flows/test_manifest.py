"""`apply`, `validate`, `export` and `definition`, on a database and behind a server."""

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.orchestrate import WAIT_S, Orchestrate, Remote, serving, token_of
from tests.manifest.examples import FLOW, S2

from tenuto.manifest.manifest import read_manifest


@pytest.fixture(params=["near", "far"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Orchestrate]:
    """A command line on a database of its own, and one behind a server on it."""
    local = Orchestrate(tmp_path)
    if request.param == "near":
        yield local
        return
    with serving(local) as url:
        yield Remote(tmp_path, url, token_of(local))


def test_files_are_applied_shown_and_exported(cli: Orchestrate) -> None:
    folder = cli.home / "flows" / "deep"
    folder.mkdir(parents=True)
    (folder / "flow.yml").write_text(FLOW)
    (cli.home / "flows" / "s2.yaml").write_text(S2)
    (cli.home / "flows" / "notes.txt").write_text("not: read: at: all")
    dry = cli.ok("apply", "-f", "flows", "--dry-run")
    assert "+ task task-200 created" in dry
    assert dry.endswith("(dry run: nothing was changed)\nwould start task-200")
    assert cli.json("definition", "list")["definitions"] == []
    done = cli("apply", "-f", "flows")
    assert "13 created, 0 updated, 0 unchanged\nstarted task-200: " in done.out
    assert "warning: flows/s2.yaml:11:11: group_id: there is no group" in done.err
    again = cli.json("apply", "-f", "flows")
    assert {definition["action"] for definition in again["definitions"]} == {"unchanged"}
    text = cli("export").out
    assert read_manifest({"f": text}).specs == read_manifest({"a": FLOW, "b": S2}).specs
    assert read_manifest({"f": cli("export", "report").out}).specs.keys() == {"report"}
    assert cli.json("export", "report")["manifest"].startswith("tasks:")
    listed = cli.ok("definition", "list", "--limit", "2")
    assert listed.splitlines()[0].split() == ["KEY", "KIND", "VERSION", "CHANGED", "TITLE"]
    assert "name: Every night" in cli.ok("definition", "show", "nightly")
    assert cli.json("definition", "show", "nightly")["spec"]["children"] == ["clean", "fetch"]
    assert cli.ok("definition", "delete", "task-200") == "deleted task-200"
    assert cli("definition", "show", "task-200").code == 1
    assert cli("export", "task-200").code == 1


def test_changed_definition_is_shown_by_field(cli: Orchestrate) -> None:
    file = cli.home / "a.yaml"
    file.write_text("id: a\npriority: 3\nprompt: |\n  one\n  two\n")
    cli.ok("apply", "-f", "a.yaml")
    file.write_text("id: a\ntags: [x]\nprompt: |\n  one\n  three\n")
    shown = cli.ok("apply", "-f", "a.yaml", "--dry-run")
    assert shown.splitlines() == [
        "~ task a updated",
        "      prompt:",
        "    -   two",
        "    +   three",
        "    - priority: 3",
        '    + tags: ["x"]',
        "0 created, 1 updated, 0 unchanged (dry run: nothing was changed)",
    ]
    fields = cli.json("apply", "-f", "a.yaml")["definitions"][0]["fields"]
    assert {field["field"] for field in fields} == {"priority", "prompt", "tags"}


def test_manifest_is_read_from_standard_input(cli: Orchestrate) -> None:
    assert cli.ok("apply", "-f", "-", stdin="id: piped").startswith("+ task piped created")


def test_errors_in_files_are_printed_with_their_locations(cli: Orchestrate) -> None:
    (cli.home / "bad.yaml").write_text("tasks:\n- {id: a, priority: 0}\n- {id: b, promt: x}\n")
    (cli.home / "evil.yaml").write_text("id: !!python/object/apply:os.system [touch owned]\n")
    for words in (("apply",), ("validate",), ("apply", "--dry-run")):
        answer = cli(*words, "-f", "bad.yaml", "-f", "evil.yaml")
        assert answer.code == 2
        assert answer.err.splitlines() == [
            "error: bad.yaml:2:21: tasks[0].priority: must be between 1 and 10, not 0",
            "bad.yaml:3:11: tasks[1]: unknown field 'promt'; did you mean 'prompt'?",
            "evil.yaml:1:5: the tag !!python/object/apply:os.system is not allowed [invalid_value]",
        ]
    output = cli("--json", "apply", "-f", "bad.yaml")
    assert json.loads(output.out)["error"]["code"] == "invalid_value"
    (cli.home / "latin.yaml").write_bytes(b"id: a\nname: \xe9\n")
    assert "latin.yaml:2:7: is not UTF-8 text" in cli("apply", "-f", "latin.yaml").err
    assert cli("apply", "-f", "nowhere.yaml").code == 2
    assert cli("apply").code == 2
    (cli.home / "empty").mkdir()
    assert "no file that ends in" in cli("apply", "-f", "empty").err
    assert not (cli.home / "owned").exists()


@pytest.mark.parametrize("cli", ["near"], indirect=True)
def test_validate_needs_no_database(cli: Orchestrate) -> None:
    (cli.home / "s2.yaml").write_text(S2)
    nowhere = {"TENUTO_DATABASE": "postgresql://nobody@127.0.0.1:1/none"}
    answer = cli("validate", "-f", "s2.yaml", **nowhere)
    assert (answer.code, answer.out) == (0, "valid: 1 tasks, 1 groups\n")
    reported = cli.json("validate", "-f", "s2.yaml")
    assert (reported["ok"], reported["tasks"], len(reported["warnings"])) == (True, 1, 1)
    assert not cli.data.exists()


@pytest.mark.parametrize("cli", ["near"], indirect=True)
def test_terminal_shows_colours(cli: Orchestrate) -> None:
    (cli.home / "a.yaml").write_text("id: a")
    for colour in (True, False):
        if not colour:
            cli.environment["NO_COLOR"] = "1"
        master, slave = pty.openpty()
        words = ("apply", "-f", "a.yaml", "--dry-run")
        process = cli.start(*words, stdout=slave, stderr=subprocess.DEVNULL)
        os.close(slave)
        assert process.wait(WAIT_S) == 0
        out = os.read(master, 10_000).decode()
        os.close(master)
        assert ("\x1b[32m+ task a created" in out) is colour
        assert "+ task a created" in out
