"""Definitions through a server are equal to those of the engine itself."""

import pytest
from tests.api.conftest import Api
from tests.manifest.examples import FLOW
from tests.manifest.test_writing import SPECS

from tenuto.client.remote.engine import RemoteEngine
from tenuto.engine.engine import Engine
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.tasks.submission import NewTask


async def test_definitions_are_equal_direct_and_remote(
    api: Api, far: RemoteEngine, near: Engine
) -> None:
    for spec in SPECS:
        view = await far.definitions.put(spec)
        assert await near.definitions.get(view.key) == view
        assert await far.definitions.get(view.key) == view
        assert await near.definitions.put(spec) == view
    assert await far.definitions.page(3) == await near.definitions.page(3)
    assert await far.definitions.export() == await near.definitions.export()
    keys = ["bare", "every/thing:1"]
    assert await far.definitions.export(keys) == await near.definitions.export(keys)
    await far.definitions.delete("every/thing:1")
    with pytest.raises(NotFound):
        await near.definitions.get("every/thing:1")


async def test_definition_refusals_are_equal_direct_and_remote(
    api: Api, far: RemoteEngine, near: Engine
) -> None:
    await far.definitions.put(NewTask(title="a", key="a"), 0)
    for engine in (far, near):
        with pytest.raises(Conflict) as stale:
            await engine.definitions.put(NewTask(title="b", key="a"), 0)
        assert stale.value.code == "version_conflict"
        with pytest.raises(Conflict):
            await engine.definitions.delete("a", 7)
        with pytest.raises(NotFound):
            await engine.definitions.export(["nobody"])
    reports = []
    for engine in (far, near):
        with pytest.raises(Invalid) as caught:
            await engine.definitions.apply_files({"f.yaml": b"id: b\npriority: 0\nfoo: 1"})
        reports.append((caught.value.message, caught.value.code, caught.value.details["field"]))
        with pytest.raises(Invalid, match="is not UTF-8"):
            await engine.definitions.apply_files({"f.yaml": b"\xff"})
    assert reports[0] == reports[1]


async def test_files_are_applied_through_a_server(
    api: Api, far: RemoteEngine, near: Engine
) -> None:
    dry = await far.definitions.apply_files({"f": FLOW}, dry_run=True)
    assert dry == await near.definitions.apply_files({"f": FLOW}, dry_run=True)
    done = await far.definitions.apply_files({"f": FLOW})
    assert done.definitions == dry.definitions
    again = await near.definitions.apply_files({"f": FLOW})
    assert {definition.action for definition in again.definitions} == {"unchanged"}
