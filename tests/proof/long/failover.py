"""Failover: a PostgreSQL cluster loses its primary under load; nothing acknowledged is lost.

Three servers under Patroni, of which one follows synchronously. Each case is 10,000 tasks that
one client submits, each under a key; the fault strikes after a third of them.
"""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.proof.failover.load import Load, Witness, load
from tests.services.cluster import Cluster, processes_in
from tests.services.network import SIZE, Namespaces
from tests.services.postgres import ROOT
from tests.waiting import eventually_sync

from tenuto.clock import Clock

FAULT_AFTER = 0.3
"""The share of tasks that are acknowledged before the fault."""
CUT_S = 15.0
SETTLES_S = 5.0
"""Seconds within which a fault of the standbys is complete."""
NO_STANDBY_S = 40.0
BACKLOG = 0.1
HEAD = (
    "| case | tasks | new primary | longest gap | lost | doubled | stuck | run twice | never run"
    " | leases lost |"
)
Fault = Callable[[Cluster, int, Load], Awaitable[float | None]]
CLOCK = Clock()
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster on the loopback."""
    with Cluster() as created:
        print(f"\n{HEAD}")
        yield created


@pytest.fixture(scope="module")
def apart() -> Iterator[Cluster]:
    """A cluster whose machines are network namespaces, with a member of etcd each."""
    with Cluster(Namespaces(), etcds=SIZE) as created:
        yield created


async def dies(cluster: Cluster, leader: int, _: Load) -> float:
    return await replaced(cluster, leader, cluster.kill_machine)


async def is_switched(cluster: Cluster, leader: int, _: Load) -> float:
    return await replaced(cluster, leader, lambda _: cluster.switchover())


async def loses_postmaster(cluster: Cluster, leader: int, _: Load) -> float:
    return await replaced(cluster, leader, cluster.kill_postmaster)


async def freezes(cluster: Cluster, leader: int, _: Load) -> float:
    return await replaced(cluster, leader, cluster.freeze)


async def is_cut_off(cluster: Cluster, leader: int, _: Load) -> float:
    net = cluster.net
    assert isinstance(net, Namespaces)
    return await replaced(cluster, leader, lambda n: net.cut("inner", n))


async def is_out_of_reach(cluster: Cluster, leader: int, _: Load) -> None:
    """Clients lose the primary, which goes on leading, for a while."""
    assert isinstance(cluster.net, Namespaces)
    cluster.net.cut("outer", leader)
    await CLOCK.sleep(CUT_S)
    cluster.net.restore("outer", leader)


async def loses_standbys(cluster: Cluster, leader: int, running: Load) -> None:
    """The primary has no standby for a while, without which it may acknowledge nothing.

    There is work for the claims of that time: it is not known what becomes of them.
    """
    standbys = [n for n in range(SIZE) if n != leader]
    await asyncio.to_thread(cluster.require_standby, strict=True)
    async with running.backlog(BACKLOG):
        for n in standbys:
            await asyncio.to_thread(cluster.freeze, n)
    await CLOCK.sleep(NO_STANDBY_S)
    for n in standbys:
        cluster.thaw(n)


async def replaced(cluster: Cluster, leader: int, inject: Callable[[int], None]) -> float:
    """Injects the fault; returns the seconds until another machine leads."""
    began = CLOCK.elapsed()
    await asyncio.to_thread(inject, leader)
    await asyncio.to_thread(cluster.new_leader, leader)
    return CLOCK.elapsed() - began


@pytest.mark.parametrize(
    ("case", "fault", "position"),
    [
        ("machine dies", dies, 0),
        ("planned switchover", is_switched, 0),
        ("postmaster killed", loses_postmaster, 0),
        ("primary frozen, first in the address", freezes, 0),
        ("primary frozen, last in the address", freezes, 2),
    ],
)
async def test_failed_primary_is_replaced(
    cluster: Cluster, tmp_path: Path, case: str, fault: Fault, position: int
) -> None:
    await run(cluster, tmp_path, case, fault, position)


async def test_commits_wait_for_a_standby(cluster: Cluster, tmp_path: Path) -> None:
    case = f"both standbys frozen for {NO_STANDBY_S:.0f} s, strict"
    try:
        await run(cluster, tmp_path, case, loses_standbys, 0, away_s=NO_STANDBY_S - SETTLES_S)
    finally:
        await asyncio.to_thread(cluster.require_standby, strict=False)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("primary cut off from etcd and standbys", is_cut_off),
        (f"clients cut off from the primary for {CUT_S:.0f} s", is_out_of_reach),
    ],
)
async def test_network_cut_loses_no_task(
    apart: Cluster, tmp_path: Path, case: str, fault: Fault
) -> None:
    await run(apart, tmp_path, case, fault, 0)


@pytest.mark.parametrize("net", ["Loopback", "Namespaces"])
def test_cluster_ends_with_its_owner(net: str) -> None:
    program = f"""
import signal
from tests.services.cluster import Cluster
from tests.services.network import {net}
cluster = Cluster({net}())
cluster.begin()
print(cluster.folder, cluster.net.token, flush=True)
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder, _, token = owner.stdout.readline().strip().partition(" ")
        eventually_sync(lambda: len(processes_in(Path(folder))) > SIZE, 20)
        owner.kill()
    eventually_sync(lambda: not processes_in(Path(folder)), 30)
    eventually_sync(lambda: not Path(folder).exists(), 30)
    if token:
        eventually_sync(lambda: not [*Path("/run/netns").glob(f"{token}-*")], 30)


async def run(
    cluster: Cluster, folder: Path, case: str, fault: Fault, position: int, *, away_s: float = 0.0
) -> None:
    """Play one case with the leader at that place of the address, and judge it.

    For `away_s` seconds nothing may be acknowledged.
    """
    await asyncio.to_thread(cluster.heal)
    leader = cluster.leader()
    order = [n for n in range(SIZE) if n != leader]
    order.insert(position, leader)
    name = f"case_{case.replace(' ', '_').replace(',', '')}"
    anywhere, address = cluster.address(name), cluster.address(name, order)
    async with (
        load(folder, cluster.direct(leader, "postgres"), name, address) as running,
        Witness(cluster.direct(leader, "postgres")).watch() as witness,
    ):
        await running.acknowledged(FAULT_AFTER)
        leader_s = await fault(cluster, leader, running)
        await running.acknowledged((1 + FAULT_AFTER) / 2)
        await asyncio.to_thread(cluster.heal)
        outcome = await running.outcome(anywhere)
    print(f"\n{outcome.line(case, leader_s)}")
    outcome.check(away_s)
    witness.check(leader_s)
    assert await witness.lost(cluster.address("postgres")) == set()
