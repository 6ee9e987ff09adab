"""The documents say what the source does: generated parts are current and examples run."""

import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from docs import generate
from tests.cli.orchestrate import WAIT_S, Orchestrate
from tests.waiting import eventually_sync

from tenuto.cli.root import cli as root
from tenuto.model.tasks.task import Outcome, Status
from tenuto.settings import load
from tenuto.store.schema import migrations, statements

ROOT = Path(__file__).resolve().parents[1]
PAGES = generate.pages(ROOT)
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_TEST = re.compile(r"\[`(test_\w+)`\]\(([^)#]+)\)")
FILE_NAME = re.compile(r"# (\w+\.py)\n")
SECTIONS = ["Context", "Decision", "Consequences", "Cost", "Alternatives"]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    mark: str
    text: str


def blocks(language: str) -> Iterator[Block]:
    for page in PAGES:
        for result, mark, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if result == language:
                yield Block(page.relative_to(ROOT).as_posix(), result, mark.strip(), text)


def name_of(block: Block) -> str:
    return block.page


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every call of `orchestrate` in a shell block, without what a shell would do around it."""
    for block in blocks("sh"):
        for line in block.text.splitlines():
            if result := re.search(r"(?:^|\$\()(orchestrate [^#]*)", line):
                words = shlex.split(result[1].strip().removesuffix(")"), comments=True)
                yield f"{block.page}: {line}", words[1:]


@cache
def code_words() -> set[str]:
    """Returns every word of the Python and SQL files of the program and its tests."""
    paths = [p for folder in ("src", "tests") for p in (ROOT / folder).rglob("*.*")]
    return {
        word
        for path in paths
        if path.suffix in {".py", ".sql"} and path != Path(__file__)
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }


@pytest.fixture
def cli(tmp_path: Path) -> Orchestrate:
    return Orchestrate(tmp_path)


def test_generated_parts_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_outdated_page_is_detected(tmp_path: Path) -> None:
    for page in PAGES:
        copy = tmp_path / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page.read_text(encoding="utf-8").replace("TENUTO_SLOTS", "TENUTO_SLOT"))
    assert [page for page, _ in generate.find_stale(tmp_path)] == [
        tmp_path / "docs" / "settings.md"
    ]


def test_every_generated_part_is_on_a_page() -> None:
    matches = [name for page in PAGES for name, _ in generate.BLOCK.findall(page.read_text())]
    assert sorted(matches) == sorted(generate.BLOCKS)


def test_statuses_and_outcomes_are_described() -> None:
    page = (ROOT / "docs" / "state-machine.md").read_text()
    assert re.findall(r"^\| ([A-Z_]+) \|", page, re.MULTILINE) == list(Status)
    assert {outcome for outcome in Outcome if outcome not in page} == set()


def test_variables_of_a_command_are_described() -> None:
    source = (ROOT / "src/tenuto/worker/runtime/command.py").read_text()
    page = (ROOT / "docs" / "commands-for-tasks.md").read_text()
    assert {name for name in re.findall(r"TENUTO_\w+", source) if name not in page} == set()


def test_every_environment_variable_is_described() -> None:
    sources = (path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    existing = {name for text in sources for name in re.findall(r"TENUTO_[A-Z_]+\b", text)}
    pages = [ROOT / "docs" / name for name in ("settings.md", "commands-for-tasks.md")]
    reported = "".join(page.read_text() for page in pages)
    assert {"TENUTO_URL", "TENUTO_DATABASE"} <= existing
    assert {name for name in existing if f"`{name}`" not in reported} == set()


def test_tests_of_the_guarantees_exist() -> None:
    named = [
        (page, test, position)
        for page in PAGES
        for test, position in NAMED_TEST.findall(page.read_text())
    ]
    assert named
    for page, test, position in named:
        assert f"def {test}(" in (page.parent / position).read_text(), f"{page.name}: {test}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda p: p.stem
)
def test_decision_is_one_screen_in_five_parts(path: Path) -> None:
    text = path.read_text()
    assert re.match(rf"# {path.name[:4]}\. \S", text)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert len(text.splitlines()) <= 60


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda p: p.stem
)
def test_a_decision_names_code_that_exists(path: Path) -> None:
    text = path.read_text()
    names = set(re.findall(r"`([^`\n]+)`", text[: text.index("## Alternatives")]))
    classes = {name for name in names if re.fullmatch(r"(?:[A-Z]+[a-z]+){2,}", name)}
    functions = {name for name in names if re.fullmatch(r"(?!pg_)[a-z]+(?:_[a-z]+)+", name)}
    files = {name for name in names if re.fullmatch(r"[\w./]+(?:/|\.py|\.sql)", name)}
    words = code_words()
    assert {name for name in classes | functions if name not in words} == set()
    bases = [ROOT, ROOT / "src/tenuto", ROOT / "src/tenuto/store"]
    assert {name for name in files if not any((base / name).exists() for base in bases)} == set()


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = [line for block in blocks("sh") for line in block.text.splitlines()]
    prose = [text for page in PAGES for text in re.findall(r"`([^`\n]+)`", page.read_text())]
    named = {line.split()[1] for line in shell + prose if re.match(r"make [a-z]", line)}
    assert {"demo", "test", "check"} <= named
    assert named <= targets


def misunderstood(words: list[str]) -> str | None:
    """Returns the reason why the command line is wrong usage."""
    command: click.Command = root
    path = ["orchestrate"]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        result = command.get_command(click.Context(command), words[0])
        if result is None:
            return f"no command {words[0]}"
        command = result
        path.append(words.pop(0))
    try:
        command.make_context(" ".join(path), words)
    except click.UsageError as error:
        return error.format_message()
    return None


def test_command_lines_in_the_docs_are_valid() -> None:
    reported = {where: misunderstood(words) for where, words in command_lines()}
    assert len(reported) > 50
    assert {where: reason for where, reason in reported.items() if reason is not None} == {}


@pytest.mark.parametrize("block", [b for b in blocks("sh") if b.mark == "run"], ids=name_of)
def test_shell_example_runs(block: Block, cli: Orchestrate) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-eu", "-c", block.text],
        cwd=cli.home,
        env=cli.environment | {"PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Nightly report" in done.stdout


@pytest.mark.parametrize(
    "block", [b for b in blocks("python") if not FILE_NAME.match(b.text)], ids=name_of
)
def test_python_example_runs(block: Block, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if block.page == "README.md":
        [shown] = [item.text for item in blocks("text") if item.page == "README.md"]
        assert done.stdout == shown


@pytest.fixture
def files(cli: Orchestrate) -> None:
    """The examples that have a file name, in the folder where commands run."""
    for block in blocks("python"):
        if name := FILE_NAME.match(block.text):
            (cli.home / name[1]).write_text(block.text)


@pytest.fixture
def worker(cli: Orchestrate, files: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """A worker started with the words that the test asks for."""
    log = cli.home / "worker.log"
    with log.open("wb") as out:
        process = cli.start("worker", *request.param, stdout=out, stderr=out)
    yield
    process.terminate()
    assert process.wait(WAIT_S) == 0, log.read_text()
    assert "Traceback" not in log.read_text()


def ended(cli: Orchestrate, task: str) -> dict[str, object]:
    def check() -> dict[str, object] | None:
        view: dict[str, object] = cli.json("task", "show", task)
        return view if view["finishedAt"] else None

    return eventually_sync(check, timeout=WAIT_S, every=0.2)


@pytest.mark.parametrize("worker", [["--app", "agents:handlers"]], indirect=True, ids=["handlers"])
def test_example_handlers_run(cli: Orchestrate, worker: None) -> None:
    [line] = [words for where, words in command_lines() if "--type research" in where]
    view = ended(cli, cli.ok(*line))
    assert view["status"] == "COMPLETED", view
    assert (view["checkpointData"], view["progressPercent"]) == (2, 100)
    assert isinstance(view["outputResult"], dict)
    child = ended(cli, view["outputResult"]["review"])
    assert (child["outputResult"], child["parentId"]) == ("approved", view["id"])


TEAM = ["--app", "team:handlers", "--slots", "1"]


@pytest.mark.parametrize("worker", [TEAM], indirect=True, ids=["team"])
def test_example_team_reports(cli: Orchestrate, worker: None) -> None:
    topics = '{"topics": ["tea", "rain"]}'
    task = cli.ok("task", "create", "--name", "Report", "--type", "report", "--input", topics)
    view = ended(cli, task)
    text = ["All about tea.", "All about rain."]
    assert view["outputResult"] == {"published": True, "text": text}


@pytest.mark.parametrize("worker", [[]], indirect=True, ids=["commands"])
def test_example_command_reports(cli: Orchestrate, worker: None) -> None:
    [line] = [words for where, words in command_lines() if "crawl.py" in where]
    answer = cli(*line)
    assert answer.code == 0, answer.err
    assert answer.out.splitlines() == ["page 1", "page 2", "page 3"]
    [task] = cli.json("task", "list")["tasks"]
    view = cli.json("task", "show", task["id"])
    assert (view["outputResult"], view["checkpointData"]) == ({"pages": 3}, 3)


def test_example_queries_run() -> None:
    database = sqlite3.connect(":memory:")
    for migration in migrations():
        for statement in statements(migration, "sqlite"):
            database.execute(statement)
    for block in blocks("sql"):
        for query in block.text.split(";"):
            database.execute(query)
    database.close()


def test_example_settings_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TENUTO_")]:
        monkeypatch.delenv(name)
    [block] = [item for item in blocks("toml") if item.page != "docs/adapters.md"]
    file = tmp_path / "tenuto.toml"
    file.write_text(block.text)
    chosen = load(file=file)
    assert {name: getattr(chosen, name) for name in tomllib.loads(block.text)} == tomllib.loads(
        block.text
    )


def test_every_area_of_the_long_tests_is_documented() -> None:
    table = (ROOT / "docs" / "testing.md").read_text()
    areas = sorted(path.stem for path in (ROOT / "tests/proof/long").glob("*.py"))
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == areas
