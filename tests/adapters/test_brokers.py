"""What every broker of hints does. A new one gets a line in `URLS`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.adapters.outside import imported, install
from tests.waiting import eventually

from tenuto import app
from tenuto.broker.protocol import ALL_TOPICS, Wakeups

URLS = {
    "memory": "memory:",
    "local": "{sqlite}",
    "postgres": "{postgres}",
    "installed": "hintfile://{folder}/hints",
}
SHARED = sorted(URLS.keys() - {"memory"})
"""Brokers that connect processes."""

Open = Callable[..., Awaitable[Wakeups]]


@pytest.fixture(params=URLS)
async def broker(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Open]:
    """Opens the broker as another process would; `listen=False`: one that only sends."""
    if request.param == "installed":
        imported(install(tmp_path / "site"), monkeypatch)
    kind = "postgres" if request.param == "postgres" else "sqlite"
    database = str(request.getfixturevalue(f"{kind}_url"))
    url = URLS[request.param].format(folder=tmp_path, **{kind: database})
    store = app.create_store(database)
    await store.migrate()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)

        async def opened(name: str, *, listen: bool = True) -> Wakeups:
            wakeups = app.create_wakeups(url, store, name, listen=listen)
            if listen:
                await wakeups.open()
            stack.push_async_callback(wakeups.close)
            return wakeups

        yield opened


def received_by(wakeups: Wakeups) -> list[str]:
    """The topics that it delivers from now on."""
    topics: list[str] = []
    wakeups.subscribe(topics.append)
    return topics


async def all_received(listeners: list[list[str]], topic: str) -> None:
    await eventually(lambda: all(topic in topics for topics in listeners))


async def test_a_hint_reaches_all_listeners_of_its_process_once(broker: Open) -> None:
    here = await broker("here")
    first, second = received_by(here), received_by(here)
    here.notify(["lane:1", "worker:host:1:w"])
    here.notify(["lane:2"])
    await eventually(lambda: len(first) == len(second) == 3)
    for topics in (first, second):
        assert sorted(topics) == ["lane:1", "lane:2", "worker:host:1:w"]


async def test_who_unsubscribed_receives_nothing(broker: Open) -> None:
    here = await broker("here")
    gone: list[str] = []
    unsubscribe = here.subscribe(gone.append)
    received = received_by(here)
    unsubscribe()
    unsubscribe()
    here.notify(["lane:1"])
    await eventually(lambda: received == ["lane:1"])
    assert gone == []


async def test_a_listener_may_unsubscribe_while_it_is_called(broker: Open) -> None:
    here = await broker("here")
    once: list[str] = []

    def listener(topic: str) -> None:
        once.append(topic)
        unsubscribe()

    unsubscribe = here.subscribe(listener)
    received = received_by(here)
    here.notify(["lane:1"])
    here.notify(["lane:2"])
    await eventually(lambda: received == ["lane:1", "lane:2"])
    assert once == ["lane:1"]


async def test_hints_need_no_listener_and_no_topic(broker: Open) -> None:
    here = await broker("here", listen=False)
    here.notify(["lane:1"])
    here.notify([])
    received = received_by(here)
    here.notify(iter(["lane:2"]))
    await eventually(lambda: received == ["lane:2"])


async def test_a_closed_broker_delivers_nothing_and_is_closed_again(broker: Open) -> None:
    here = await broker("here")
    received = received_by(here)
    await here.close()
    await here.close()
    other = await broker("other")
    elsewhere = received_by(other)
    other.notify(["lane:1"])
    await eventually(lambda: elsewhere == ["lane:1"])
    assert received == []


@pytest.mark.parametrize("broker", SHARED, indirect=True)
async def test_a_hint_reaches_every_process_that_listens(broker: Open) -> None:
    sender = await broker("sender", listen=False)
    received: list[list[str]] = []
    for number in range(1, 4):
        received.append(received_by(await broker(f"listener{number}")))
        sender.notify([f"lane:{number}"])
        await all_received(received, f"lane:{number}")
    assert received[0] == ["lane:1", "lane:2", "lane:3"]
    assert received[2] == ["lane:3"]


@pytest.mark.parametrize("broker", SHARED, indirect=True)
async def test_own_hints_are_received_once(broker: Open) -> None:
    here, there = await broker("here"), await broker("there")
    received, received_there = received_by(here), received_by(there)
    here.notify(["lane:1"])
    await eventually(lambda: received_there == ["lane:1"])
    there.notify(["lane:2"])
    await eventually(lambda: "lane:2" in received)
    assert received == ["lane:1", "lane:2"]


@pytest.mark.parametrize("broker", SHARED, indirect=True)
async def test_stopped_process_does_not_disturb_others(broker: Open) -> None:
    gone, here, sender = [await broker(name) for name in ("gone", "here", "sender")]
    received_by(gone)
    received = received_by(here)
    sender.notify(["lane:1"])
    await eventually(lambda: received == ["lane:1"])
    await gone.close()
    sender.notify(["lane:2"])
    await eventually(lambda: received == ["lane:1", "lane:2"])


@pytest.mark.parametrize("broker", SHARED, indirect=True)
async def test_many_hints_at_once_arrive_or_become_the_hint_for_everything(broker: Open) -> None:
    sender, here = await broker("sender"), await broker("here")
    received = received_by(here)
    topics = {f"lane:{number}" for number in range(2000)}
    sender.notify(topics)
    await eventually(lambda: set(received) in (topics, {ALL_TOPICS}))
