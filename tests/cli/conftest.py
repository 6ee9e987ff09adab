"""A command line on an empty data folder, and tasks that need no worker to get into a state."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.orchestrate import Answer, Orchestrate

from tenuto import app
from tenuto.cli.main import main
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.transcript import Line
from tenuto.settings import Settings

Die = Callable[..., str]


@pytest.fixture
def cli(tmp_path: Path) -> Orchestrate:
    return Orchestrate(tmp_path)


class Here:
    """Runs commands on the same data folder in this process, which takes a tenth of the time."""

    def __init__(self, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._data = data
        self._capsys = capsys

    def __call__(self, *words: str) -> Answer:
        """The answer to a command line."""
        self._capsys.readouterr()
        code = main(["--data", str(self._data), *words])
        return Answer(code, *self._capsys.readouterr())

    def ok(self, *words: str) -> str:
        """Runs a command that must succeed and returns its output."""
        answer = self(*words)
        assert answer.code == 0, answer
        return answer.out.strip()


@pytest.fixture
def here(cli: Orchestrate, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(cli.data, capsys)


async def _die(settings: Settings, title: str, output: str, error: str) -> str:
    async with app.connect(settings) as engine:
        await engine.submit(NewTask(title=title, max_attempts=1, priority=10))
        profile = AgentProfile(
            id=engine.clock.new_id(), workspace=engine.workspace, name="tester", runtimes=("test",)
        )
        agent = await engine.register_agent(profile)
        [work] = await engine.claim(agent, "host:1:test")
        await engine.append(work.fence, [Line(0, "INFO", output), Line(1, "ERROR", "last words")])
        await engine.fail(work.fence, Failure(message=error, exit_code=7))
        return str(work.fence.task)


@pytest.fixture
def die(cli: Orchestrate) -> Die:
    """Makes a task that an attempt printed for and failed, so that it is DEAD; answers its id."""

    def make(title: str = "dead", output: str = "hello", error: str = "boom") -> str:
        return app.run(_die(Settings(data=str(cli.data)), title, output, error))

    return make
