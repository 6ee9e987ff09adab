"""The examples of the page about flows: each runs, and ends as its drawing shows."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.contract.flows.helpers import Wrong, worked

from tenuto import app
from tenuto.cli.flows.flow_tree import tree_lines
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.settings import Settings

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "flows.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(
    r"^```yaml\n# flow start (\S+)\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
EXAMPLES = EXAMPLE.findall(PAGE)
RESULTS: dict[str, Any] = {"fetch": {"pages": ["a", "b"]}}


def test_every_flow_example_is_run() -> None:
    assert len(EXAMPLES) == PAGE.count("```yaml") == 6


@pytest.mark.parametrize(("key", "manifest", "drawing"), EXAMPLES, ids=[e[0] for e in EXAMPLES])
async def test_flow_example_finishes_as_drawn(
    key: str, manifest: str, drawing: str, tmp_path: Path
) -> None:
    scores = iter([5, 9])

    def handler(work: ClaimedTask) -> Any:
        if work.key == "links":
            raise Wrong("no")
        if work.key == "draft":
            return {"score": next(scores)}
        return RESULTS.get(work.key or "")

    async with app.connect(Settings(data=str(tmp_path))) as engine:
        profile = AgentProfile(
            id=engine.clock.new_id(), workspace=engine.workspace, name="a", runtimes=("test",)
        )
        agent = await engine.register_agent(profile)
        await engine.definitions.apply_files({"flow.yaml": manifest})
        flow = await engine.flows.start(key)
        await worked(engine, agent, handler)
        for item in await engine.inbox.list():
            if item.kind == "approval":
                await engine.inbox.answer(item.id, approve=True)
        await worked(engine, agent, handler)
        assert (await engine.flow_views.show(flow)).status == "COMPLETED"
        shown = [
            f"{line.branch}{line.text}" for line in tree_lines(await engine.flow_views.graph(flow))
        ]
    assert shown == drawing.splitlines()
