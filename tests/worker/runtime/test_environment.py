"""Variables and folders set by tasks for a worker's command, within the owner's rules."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.conftest import Raw
from tests.proof.crash.inside import Inside, working

PRINTS = ["bash", "-c", "echo fixed; env; pwd -P"]


async def refused(inside: Inside, **fields: Any) -> str:
    """Returns why a task was refused for good; asserts that nothing of it ran."""
    task = await inside.submit(prompt="p", max_attempts=5, **fields)
    view = await inside.ended(task)
    assert (view.status, view.error_class) == ("FAILED", "invalid_input")
    assert await inside.outcomes(task) == ["NOT_STARTED"]
    assert await inside.transcript(task) == []
    return view.last_error or ""


async def test_task_sets_no_variable_of_a_workers_command_by_default(database_url: str) -> None:
    async with working(database_url, own=PRINTS) as inside:
        reason = await refused(inside, env={"MINE": "yes"})
        assert reason == "this worker does not let tasks set MINE; start it with --allow-env MINE"


@pytest.mark.parametrize("name", ["BASH_ENV", "LD_PRELOAD", "PATH", "HTTPS_PROXY"])
async def test_task_stored_before_the_rule_is_refused_at_its_start(
    database_url: str, tmp_path: Path, name: str
) -> None:
    """A definition or a task may be older than the table of refused names."""
    owned = tmp_path / "owned"
    async with working(database_url, own=PRINTS, task_env="*") as inside:
        task = await inside.submit(
            prompt="p", env={"A": "1"}, run_at=inside.engine.clock.now() + timedelta(days=1)
        )
        value = json.dumps({name: f"$(touch {owned})"})
        await Raw(database_url).execute(
            f"update task_body set env = '{value}' where task = '{task}'"
        )
        await inside.engine.start(task)
        view = await inside.ended(task)
        assert (view.status, view.error_class) == ("FAILED", "invalid_input")
        assert (view.last_error or "").startswith(f"tasks may never set {name}: ")
    assert not owned.exists()


async def test_task_folder_must_be_below_the_allowed_folders(
    database_url: str, tmp_path: Path
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "sub", other, tmp_path / "root-too"):
        folder.mkdir(parents=True)
    (root / "link").symlink_to("/etc")
    (root / "inner").symlink_to(root / "sub")
    (root / "loop").symlink_to(root / "loop")
    folders = f"{root}, {other}"
    async with working(database_url, own=["pwd", "-P"], task_folders=folders) as inside:
        for cwd, result in (
            (str(root / "sub"), root / "sub"),
            ("sub", root / "sub"),
            ("inner", root / "sub"),
            (".", root),
            ("../other", other),
            (str(other), other),
        ):
            task = await inside.submit(prompt="p", cwd=cwd)
            assert (await inside.ended(task)).status == "COMPLETED", cwd
            assert await inside.transcript(task) == [str(result)]
        for cwd in (
            "/etc",
            "link",
            str(root / "link"),
            f"{root}/../root-too",
            "../..",
            "/",
            "\u00fc/../..",
            "link/nobody-has-this",
        ):
            named = cwd if cwd.startswith("/") else "FOLDER"
            assert await refused(inside, cwd=cwd) == (
                f"this worker does not let tasks work in {cwd};"
                f" start it with --allow-folder {named}"
            )
        for cwd, reason in (
            ("loop/../link", "Too many levels of symbolic links"),
            ("gone", "No such file or directory"),
        ):
            assert await refused(inside, cwd=cwd) == f"cannot work in {cwd}: {reason}"


async def test_task_folder_must_be_below_the_workers_folder_by_default(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    async with working(database_url, own=["pwd", "-P"]) as inside:
        for cwd, result in ((None, tmp_path), (str(tmp_path / "below"), tmp_path / "below")):
            task = await inside.submit(prompt="p", cwd=cwd)
            assert (await inside.ended(task)).status == "COMPLETED"
            assert await inside.transcript(task) == [str(result)]
        assert "/etc" in await refused(inside, cwd="/etc")


@pytest.mark.parametrize(
    "own",
    [
        ["./agent.sh"],
        ["bash", "agent.sh"],
        ["agent.sh"],
        ["env", "agent.sh"],
        ["python3", "agent"],
    ],
    ids=" ".join,
)
async def test_task_folder_does_not_change_the_program_of_the_worker(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: list[str]
) -> None:
    sub = tmp_path / "sub"
    sub.mkdir()
    for folder, text in ((tmp_path, "mine"), (sub, "theirs")):
        (folder / "agent.sh").write_text(f"#!/bin/sh\necho {text}\n")
        (folder / "agent.sh").chmod(0o755)
        (folder / "agent").mkdir()
        (folder / "agent" / "__main__.py").write_text(f"print('{text}')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    async with working(database_url, own=own) as inside:
        task = await inside.submit(prompt="p", cwd="sub")
        await inside.ended(task)
        assert await inside.transcript(task) == ["mine"]


async def test_argument_that_names_a_file_is_unchanged_without_a_task_folder(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `make test`, where a file is called like the target."""
    (tmp_path / "test").touch()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    async with working(database_url, own=["echo", "test", ".", "--at=test"]) as inside:
        for cwd, reported in (
            (None, "test . --at=test"),
            ("sub", f"{tmp_path}/test . --at={tmp_path}/test"),
        ):
            await inside.ended(task := await inside.submit(prompt="p", cwd=cwd))
            assert await inside.transcript(task) == [reported]
