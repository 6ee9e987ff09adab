"""What a seed stands for: the size of the world, and which faults it is in for."""

import random
from collections import Counter
from typing import Literal

import msgspec

from tenuto.settings import Settings

Act = Literal[
    "kill worker",
    "kill coordinator",
    "stop worker",
    "stop coordinator",
    "drain worker",
    "cut off",
    "cut heart off",
    "close lid",
    "wipe hints",
]
"""What happens to processes: killed, stopped and continued, asked to end, cut off from the store
(or only their heartbeats are), everything stopped at once, all hints under way lost."""

LEASE_S = 4

HAPPENS: tuple[str, ...] = (
    *("kill worker", "kill coordinator", "stop worker", "stop coordinator", "drain worker"),
    *("cut off", "cut heart off", "close lid", "wipe hints"),
    *("call refused", "reply lost", "late commit", "slow reply", "unreachable"),
    *("hint dropped", "hint doubled", "hint delayed", "hints off"),
    *("waited", "worker ended itself", "handler failed", "sink failed", "sink dead", "death seen"),
)
"""Every kind of fault; over many seeds each must have happened."""


class Moment(msgspec.Struct, frozen=True):
    """One fault of a process: when, what, how long it lasts, and after how many callbacks."""

    at: float
    act: Act
    seconds: float
    fuse: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a run begins."""

    seed: int
    workers: int
    coordinators: int
    settings: Settings
    writers: int
    mixes: bool
    shared_agent: bool
    max_concurrent: int | None
    duration: float
    submits: int
    controls: int
    latency: float
    refused: float
    lost: float
    late: float
    slow: float
    hint_drop: float
    hint_double: float
    hints_off: bool
    """Hints never work again, not even when everything else is healed."""
    sink_fails: float
    dead_sink: bool
    """Beside the one that is checked, there is a subscriber that never takes anything."""
    deaths_seen: float
    stubborn: bool
    """Handlers go on after the store did not answer them, instead of failing."""
    moments: tuple[Moment, ...]


def make_plan(seed: int) -> Plan:
    """The plan of a seed. Each run has some kinds of faults only, so that each gets its stage."""
    rng = random.Random(f"plan {seed}")

    def maybe(chance: float, minimum: float, maximum: float) -> float:
        return rng.uniform(minimum, maximum) if rng.random() < chance else 0.0

    duration = rng.uniform(7, 16)
    writers, mixes = (1, True) if rng.random() < 0.5 else (4, False)
    settings = Settings(
        heartbeat_s=1.3,
        lease_s=LEASE_S,
        tick_s=2.0,
        poll_s=rng.choice([2.5, 6.0]),
        slots=rng.choice([2, 3, 5]),
        grace_s=2.0,
        drain_s=rng.choice([0.5, 3.0]),
        leader=rng.random() < 0.5,
    )
    return Plan(
        seed=seed,
        workers=rng.choice([1, 2, 2, 3]),
        coordinators=rng.choice([1, 2, 2]),
        settings=settings,
        writers=writers,
        mixes=mixes,
        shared_agent=rng.random() < 0.5,
        max_concurrent=rng.choice([None, None, None, 1, 2, 3]),
        duration=duration,
        submits=rng.randint(5, 9),
        controls=rng.choice([0, 6, 12]),
        latency=rng.choice([0.002, 0.01, 0.2]),
        refused=maybe(0.6, 0.01, 0.08),
        lost=maybe(0.6, 0.01, 0.12),
        late=maybe(0.3, 0.01, 0.06),
        slow=maybe(0.3, 0.002, 0.02),
        hint_drop=maybe(0.5, 0.1, 1.0),
        hint_double=maybe(0.5, 0.1, 0.5),
        hints_off=rng.random() < 0.2,
        sink_fails=maybe(0.4, 0.05, 0.3),
        dead_sink=rng.random() < 0.15,
        deaths_seen=rng.choice([0.0, 0.5, 1.0]),
        stubborn=rng.random() < 0.5,
        moments=_moments(rng, duration),
    )


def make_harsh_plan(seed: int) -> Plan:
    """The seed's plan with everything in it that makes attempts outlive their leases."""
    rng = random.Random(f"harsh {seed}")
    acts: tuple[Act, ...] = ("stop worker", "cut heart off", "cut off", "cut heart off")
    return msgspec.structs.replace(
        make_plan(seed),
        workers=3,
        max_concurrent=None,
        late=0.08,
        stubborn=True,
        moments=tuple(
            Moment(rng.uniform(1, 9), act, LEASE_S * rng.uniform(1.2, 3), 1) for act in acts
        ),
    )


def _moments(rng: random.Random, duration: float) -> tuple[Moment, ...]:
    weights: dict[Act, int] = {
        "kill worker": 6,
        "kill coordinator": 3,
        "stop worker": 6,
        "stop coordinator": 3,
        "drain worker": 3,
        "cut off": 4,
        "cut heart off": 4,
        "close lid": 2,
        "wipe hints": 2,
    }
    acts = rng.choices(list(weights), list(weights.values()), k=rng.randint(0, 6))
    return tuple(
        Moment(
            at=rng.uniform(0.5, duration),
            act=act,
            seconds=LEASE_S * (rng.uniform(1, 3) if rng.random() < 0.7 else rng.uniform(0.1, 1)),
            fuse=rng.randint(1, 60),
        )
        for act in acts
    )


class Faults:
    """What the plan's chances come to, call by call, while there are faults at all."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.on = True
        self.happened: Counter[str] = Counter()
        self.rng = random.Random(f"faults {plan.seed}")

    def happens(self, chance: float, subject: str) -> bool:
        """True if the fault happens now; counts it."""
        if not self.on or chance == 0.0 or self.rng.random() >= chance:
            return False
        self.happened[subject] += 1
        return True
