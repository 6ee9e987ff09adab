"""`orchestrate webhook` against a server, with a real endpoint."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.orchestrate import WAIT_S, Orchestrate, Remote, serving, token_of
from tests.waiting import eventually
from tests.webhooks.receiver import Receiver, answer, receiving

from tenuto.model.errors import Invalid
from tenuto.webhooks import signature


class Hooked:
    """A command line far from its server; its commands wait in a thread, the endpoint does not."""

    def __init__(self, cli: Remote) -> None:
        self._cli = cli

    async def ok(self, *words: str) -> str:
        return await asyncio.to_thread(self._cli.ok, *words)

    async def json(self, *words: str) -> Any:
        return await asyncio.to_thread(self._cli.json, *words)

    async def refusal(self, *words: str) -> tuple[int, str]:
        """Exit code and code of an error."""
        reported = await asyncio.to_thread(self._cli, "--json", *words)
        return reported.code, json.loads(reported.out)["error"]["code"]

    async def task(self) -> str:
        """The id of a task that was completed."""
        done = await self.json("run", "--follow", "--", "true")
        assert done["status"] == "COMPLETED"
        return str(done["id"])

    async def only(self, webhook: str, *statuses: str) -> dict[str, Any]:
        """The only message to a webhook, as soon as it has one of the statuses."""

        async def look() -> dict[str, Any] | None:
            [*result] = (await self.json("webhook", "deliveries", webhook))["deliveries"]
            assert len(result) < 2
            return result[0] if result and result[0]["status"] in statuses else None

        return await eventually(look, WAIT_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and token of a server with a worker, which may send webhooks to this machine."""
    local = Orchestrate(tmp_path_factory.mktemp("server"))
    local.environment |= {"TENUTO_WEBHOOK_ALLOW": "127.0.0.0/8", "TENUTO_TICK_S": "0.1"}
    with serving(local, "up") as url:
        yield url, token_of(local)


@pytest.fixture
def hooked(served: tuple[str, str], tmp_path: Path) -> Hooked:
    return Hooked(Remote(tmp_path, *served))


@pytest.fixture
async def endpoint() -> AsyncIterator[Receiver]:
    async with receiving() as created:
        yield created


async def test_endpoint_is_created_shown_changed_and_deleted(
    hooked: Hooked, endpoint: Receiver
) -> None:
    words = ("--event", "task.completed", "--event", "task.dead", "--description", "Pager")
    created = await hooked.json("webhook", "create", endpoint.url, *words)
    existing, secret = created["webhook"], created["secret"]
    hook = existing["id"]
    assert secret.startswith("whsec_")
    assert (existing["url"], existing["events"]) == (endpoint.url, ["task.completed", "task.dead"])
    assert await hooked.json("webhook", "show", hook) == existing
    assert existing in (await hooked.json("webhook", "list"))["webhooks"]
    for shown in (await hooked.ok("webhook", "show", hook), await hooked.ok("webhook", "list")):
        assert hook in shown
        assert secret not in shown
    changed = await hooked.json("webhook", "update", hook, "--event", "task.*", "--disable")
    assert (changed["events"], changed["enabled"]) == (["task.*"], False)
    assert changed["description"] == "Pager"
    fresh = await hooked.json("webhook", "rotate-secret", hook)
    assert fresh["webhook"]["id"] == hook
    assert fresh["secret"] not in ("", secret)
    assert await hooked.ok("webhook", "delete", hook) == f"deleted {hook}"
    assert await hooked.refusal("webhook", "show", hook) == (1, "not_found")
    assert await hooked.refusal("webhook", "delete", hook) == (1, "not_found")


async def test_delivery_is_sent_and_replayed_on_request(hooked: Hooked, endpoint: Receiver) -> None:
    created = await hooked.json("webhook", "create", endpoint.url, "--event", "task.completed")
    hook, secret = created["webhook"]["id"], created["secret"]
    task = await hooked.task()
    sent = await hooked.only(hook, "DELIVERED")
    assert (sent["taskId"], sent["event"], sent["responseStatus"]) == (task, "task.completed", 204)
    [first] = endpoint.got
    signature.verify(secret, first.headers, first.body)
    with pytest.raises(Invalid):
        signature.verify(secret, first.headers, first.body + b" ")
    assert json.loads(first.body)["taskId"] == task
    assert task not in await hooked.ok("webhook", "deliveries", hook, "--cursor", sent["id"])
    assert (await hooked.json("webhook", "redeliver", sent["id"]))["id"] == sent["id"]
    await eventually(lambda: len(endpoint.got) == 2, WAIT_S)
    again = endpoint.got[1]
    assert (again.headers["webhook-id"], again.body) == (first.headers["webhook-id"], first.body)
    await hooked.only(hook, "DELIVERED")
    await hooked.ok("webhook", "delete", hook)


async def test_unreachable_endpoint_is_disabled_until_enabled(
    hooked: Hooked, endpoint: Receiver
) -> None:
    endpoint.replies = [answer(410, b"no more"), answer(204)]
    created = await hooked.json("webhook", "create", endpoint.url, "--event", "task.completed")
    hook = created["webhook"]["id"]
    await hooked.task()
    failed = await hooked.only(hook, "FAILED")
    assert (failed["responseStatus"], failed["attempts"]) == (410, 1)
    shown = await hooked.json("webhook", "show", hook)
    assert not shown["enabled"]
    assert "410" in shown["disabledWhy"]
    assert "FAILED" in await hooked.ok("webhook", "deliveries", hook, "--limit", "1")
    assert (await hooked.json("webhook", "update", hook, "--enable"))["enabled"]
    output = await hooked.ok("webhook", "redeliver", failed["id"])
    assert "task.completed" in output
    assert (await hooked.only(hook, "DELIVERED"))["id"] == failed["id"]
    await hooked.ok("webhook", "delete", hook)
    assert await hooked.refusal("webhook", "redeliver", failed["id"]) == (1, "webhook_disabled")


async def test_disabled_endpoint_gets_no_delivery(hooked: Hooked, endpoint: Receiver) -> None:
    async with receiving() as other:
        hooks = [
            (await hooked.json("webhook", "create", item.url, "--event", "task.completed"))
            for item in (endpoint, other)
        ]
        off, on = (item["webhook"]["id"] for item in hooks)
        await hooked.ok("webhook", "update", off, "--disable")
        await hooked.task()
        await hooked.only(on, "DELIVERED")
        assert (await hooked.json("webhook", "deliveries", off))["deliveries"] == []
        assert endpoint.got == []
        await hooked.ok("webhook", "update", off, "--enable")
        await hooked.task()
        await hooked.only(off, "DELIVERED")
        assert len(endpoint.got) == 1
        for hook in (off, on):
            await hooked.ok("webhook", "delete", hook)


async def test_forbidden_endpoint_url_is_refused(hooked: Hooked) -> None:
    for url, code in (
        ("http://10.0.0.1/x", "url_forbidden"),
        ("https://169.254.169.254/latest", "url_forbidden"),
        ("ftp://127.0.0.1/x", "url_invalid"),
    ):
        assert await hooked.refusal("webhook", "create", url, "--event", "*") == (2, code), url
    wrong = ("webhook", "create", "http://127.0.0.1:9999/x", "--event", "task.nothing")
    assert (await hooked.refusal(*wrong))[0] == 2
