"""Output that cannot be written: closed files and full disks."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.cli.orchestrate import PROGRAM, WAIT_S, Answer, Orchestrate

from tenuto.encryption_keys import FILE, add_key, load_ring
from tenuto.model.errors import Unavailable


def shell(cli: Orchestrate, line: str, **environment: str) -> Answer:
    """The answer to a line of a shell, in which `$0` is the program."""
    done = subprocess.run(
        ["sh", "-c", line, PROGRAM],
        capture_output=True,
        cwd=cli.home,
        env=cli.environment | environment,
        timeout=WAIT_S,
        check=False,
    )
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_output_for_a_closed_file_goes_to_no_other(cli: Orchestrate) -> None:
    assert shell(cli, '"$0" task show nope 2>&-') == (1, "", "")
    assert shell(cli, '"$0" bench --tasks 5 --rounds 1 submit --json 2>&-').out.startswith("{")
    assert shell(cli, '"$0" task create --name x --tag t >&-') == (0, "", "")
    [created] = cli.json("task", "list")["tasks"]
    ended = shell(cli, '"$0" task cancel --tag t 2>&-')
    assert ended == (0, f"{created['id']}\n", "")


@pytest.mark.parametrize("words", ["--prompt-file -", "--input @-"])
def test_closed_input_is_reported(cli: Orchestrate, words: str) -> None:
    answer = shell(cli, f'"$0" task create --name x {words} <&-')
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: cannot read standard input: it is closed [invalid_value]")


FULL = "error: the output cannot be written: No space left on device [storage_full]\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["task list", "task list --json", "--version", "task --help"])
def test_full_disk_is_reported(cli: Orchestrate, words: str, unbuffered: str) -> None:
    answer = shell(cli, f'"$0" {words} >/dev/full', PYTHONUNBUFFERED=unbuffered)
    assert answer == (3, "", FULL)


@pytest.mark.parametrize("words", ["task create --name x", "run --json -- true"])
def test_task_whose_id_cannot_be_printed_is_named(cli: Orchestrate, words: str) -> None:
    answer = shell(cli, f'"$0" {words} >/dev/full')
    [created] = cli.json("task", "list")["tasks"]
    assert (answer.code, answer.out) == (3, "")
    assert answer.err.startswith(f"error: task {created['id']} is stored, but ")
    assert answer.err.endswith(" [storage_full]\n")


def test_error_is_reported_wherever_possible(cli: Orchestrate) -> None:
    answer = shell(cli, '"$0" task show nope --json >/dev/full')
    assert answer == (1, "", "error: 'nope' is not a task id [not_found]\n")
    silent = shell(cli, '"$0" task show nope 2>/dev/full', PYTHONUNBUFFERED="")
    assert silent == (1, "", "")
    answer = shell(cli, '"$0" task show nope --json 2>/dev/full')
    assert json.loads(answer.out)["error"]["code"] == "not_found"


def test_key_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    load_ring(tmp_path / "old", None)
    before = (tmp_path / "old" / FILE).read_bytes()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Unavailable, match="No space left on device") as reported:
        load_ring(tmp_path / "new", None)
    assert reported.value.code == "storage_full"
    with pytest.raises(Unavailable, match="No space left on device"):
        add_key(tmp_path / "old")
    assert (tmp_path / "old" / FILE).read_bytes() == before
    assert not [*tmp_path.rglob(f"{FILE}.new")]
    assert not (tmp_path / "new" / FILE).exists()
