"""Random small plans, and an interpreter that predicts their outcome.

It knows the rules of joins, turns, branches and dependencies from the documents, not from the code.
What runs inside a parallel `first_succeeded` group depends on who comes first: there it only says
what may run.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st
from tests.contract.flows import helpers
from tests.contract.flows.helpers import group

from tenuto.model.flows.definition import Approval, Condition, Foreach
from tenuto.model.flows.plan import Spec

Ends = Literal["success", "failure", "neither"]
JOINS = ("all_succeeded", "all_done", "any_failed", "first_succeeded")
POLICIES = ("fail", "skip", "run")
DEEPEST = 3

task = partial(helpers.task, max_attempts=50)
"""Nothing of a plan ends for want of attempts, whatever happens to it."""


class Step(msgspec.Struct, kw_only=True):
    """A node of a plan: what it does, and what comes after it in its place."""

    key: str
    next: "Node | None" = None


class Job(Step, kw_only=True):
    """Something that an agent runs, or a person decides."""

    works: bool
    asks: bool = False
    """A person says yes or no, in place of an agent."""
    needs: str | None = None
    policy: Any = "fail"
    to_sibling: bool = False
    """Its `next` is the child after it in its sequence, which runs anyway."""
    again: str | None = None
    """Its `next` is another job of its group: that runs in this one's place, and in its own."""


class Choice(Step, kw_only=True):
    holds: bool
    yes: "Node | None" = None
    no: "Node | None" = None


class Items(Step, kw_only=True):
    works: list[bool]
    order: Any
    join: Any


class Block(Step, kw_only=True):
    children: list["Node"]
    order: Any
    join: Any


Node = Job | Choice | Items | Block


class _Keys:
    def __init__(self) -> None:
        self._made = 0

    def new(self, word: str) -> str:
        self._made += 1
        return f"{word}{self._made}"


@st.composite
def plans(draw: st.DrawFn, joins: Sequence[str] = JOINS) -> Node:
    """A tree of steps, whose groups have these joins."""
    return _Drawing(draw, joins).node(0)


class _Drawing:
    """One plan while it is drawn."""

    def __init__(self, draw: st.DrawFn, joins: Sequence[str]) -> None:
        self._draw = draw
        self._joins = joins
        self._keys = _Keys()

    def node(self, depth: int) -> Node:
        draw, keys = self._draw, self._keys
        kinds = ["job", "job", "choice", "items", "block", "block", "block"]
        kinds = ["block"] if depth == 0 else kinds if depth < DEEPEST else ["job"]
        kind = draw(st.sampled_from(kinds))
        follower = self._maybe(depth + 1)
        if kind == "job":
            succeeds = draw(st.sampled_from([True, True, False]))
            asks = draw(st.integers(0, 4)) == 0
            return Job(key=keys.new("job"), works=succeeds, asks=asks, next=follower)
        order = draw(st.sampled_from(["sequential", "parallel"]))
        join = draw(st.sampled_from(self._joins))
        if kind == "choice":
            return Choice(
                key=keys.new("if"),
                holds=draw(st.booleans()),
                yes=self._maybe(depth + 1),
                no=self._maybe(depth + 1),
                next=follower,
            )
        if kind == "items":
            items = draw(st.lists(st.booleans(), max_size=3))
            return Items(key=keys.new("each"), works=items, order=order, join=join, next=follower)
        children = [self.node(depth + 1) for _ in range(draw(st.integers(0, 4)))]
        self._tie(children, order)
        return Block(
            key=keys.new("block"), children=children, order=order, join=join, next=follower
        )

    def _maybe(self, depth: int) -> Node | None:
        expected = depth <= DEEPEST and self._draw(st.integers(0, 3)) == 0
        return self.node(depth) if expected else None

    def _tie(self, children: list[Node], order: str) -> None:
        """Let some children wait for others, and some name a later one as their `next`."""
        draw: st.DrawFn = self._draw
        for index, child in enumerate(children):
            if not isinstance(child, Job):
                continue
            before = [item.key for item in children[:index] if isinstance(item, Job)]
            if before and draw(st.integers(0, 2)) == 0:
                child.needs = draw(st.sampled_from(before))
                child.policy = draw(st.sampled_from(POLICIES))
            if child.next is not None:
                continue
            first = index + 1 if order == "parallel" else index + 2
            later = [item.key for item in children[first:] if isinstance(item, Job)]
            last = index == len(children) - 1
            following = draw(st.booleans())
            other = draw(st.booleans())
            if order == "sequential" and not last and following:
                child.to_sibling = True
            elif later and other:
                child.again = draw(st.sampled_from(later))
        for index, child in enumerate(children):
            if isinstance(child, Job) and child.next is None and child.again is None:
                others = [item.key for item in children[:index] if isinstance(item, Job)]
                before = [key for key in others if not _leads(key, child.key, children)]
                if before and not child.to_sibling and draw(st.integers(0, 2)) == 0:
                    child.again = draw(st.sampled_from(before))


def _leads(key: str, other: str, children: list[Node]) -> bool:
    """True if one child leads to the other by `next` or by a dependency."""
    if key == other:
        return True
    onward: list[str] = []
    for child, behind in zip(children, [*children[1:], None], strict=True):
        if not isinstance(child, Job):
            continue
        if child.needs == key:
            onward.append(child.key)
        if child.key == key and child.again is not None:
            onward.append(child.again)
        if child.key == key and child.to_sibling and behind is not None:
            onward.append(behind.key)
    return any(_leads(item, other, children) for item in onward)


def specs(node: Node, sibling: str | None = None) -> list[Spec]:
    """The definitions that a plan is made of."""
    matches: list[Spec] = []
    after = node.next.key if node.next is not None else None
    match node:
        case Job():
            needs = [] if node.needs is None else [node.needs]
            if node.to_sibling or node.again is not None:
                after = node.again or sibling
            matches.append(
                task(
                    node.key,
                    next=after,
                    depends_on=needs,
                    on_dependency_failure=node.policy,
                    control=Approval(message=node.key) if node.asks else None,
                )
            )
        case Choice():
            control = Condition(
                expression="true" if node.holds else "false",
                on_true=None if node.yes is None else node.yes.key,
                on_false=None if node.no is None else node.no.key,
            )
            matches.append(task(node.key, next=after, control=control))
            matches += [spec for item in (node.yes, node.no) if item for spec in specs(item)]
        case Items():
            name = f"item-of-{node.key}"
            foreach = Foreach(items=node.works, template=name, order=node.order, join=node.join)
            matches += [task(node.key, next=after, control=foreach), task(name)]
        case Block():
            keys = [item.key for item in node.children]
            matches.append(group(node.key, *keys, order=node.order, join=node.join, next=after))
            for child, behind in zip(node.children, [*keys[1:], None], strict=False):
                matches += specs(child, behind)
    return matches + (specs(node.next) if node.next is not None else [])


def steps(node: Node | None) -> Iterator[Node]:
    """All steps of a plan."""
    if node is None:
        return
    yield node
    yield from steps(node.next)
    if isinstance(node, Choice):
        yield from steps(node.yes)
        yield from steps(node.no)
    if isinstance(node, Block):
        for child in node.children:
            yield from steps(child)


class Forecast:
    """What a plan comes to: `runs` for certain, `may` at most, and how groups end."""

    def __init__(self, root: Node, cancelled: Collection[str] = ()) -> None:
        self._cancelled = cancelled
        """Steps that people cancelled when they had their turn."""
        self.runs: Counter[str] = Counter()
        self.may: Counter[str] = Counter()
        self.groups: dict[str, list[str]] = {}
        self.unsure: set[str] = set()
        """Groups of which nobody can say whether and how they end."""
        self._jobs = {step.key: step for step in steps(root) if isinstance(step, Job)}
        self._sure = True
        self.end = "FAILED" if self._slot(root) == "failure" else "COMPLETED"

    def _ran(self, key: str) -> None:
        (self.runs if self._sure else self.may)[key] += 1

    def _slot(self, node: Node) -> Ends:
        match node:
            case Job():
                if node.key in self._cancelled:
                    return "failure"
                self._ran(node.key)
                return self._then(node) if node.works else "failure"
            case Choice():
                branch = node.yes if node.holds else node.no
                return self._slot(branch) if branch is not None else self._then(node)
            case Items():
                name = f"item-of-{node.key}"
                items = [partial(self._item, name, succeeds=succeeds) for succeeds in node.works]
                return self._joined(node, node.order, node.join, items)
            case Block():
                children = _Siblings(self, node.children)
                runs = [partial(children.run, number) for number in range(len(node.children))]
                return self._joined(node, node.order, node.join, runs)

    def _item(self, key: str, *, succeeds: bool) -> Ends:
        self._ran(key)
        return "success" if succeeds else "failure"

    def _then(self, node: Node) -> Ends:
        if isinstance(node, Job) and node.again is not None:
            return self._slot(self._jobs[node.again])  # that one waits for nobody here
        return "success" if node.next is None else self._slot(node.next)

    def _joined(
        self, node: Node, order: str, join: str, children: Sequence[Callable[[], Ends]]
    ) -> Ends:
        sure = self._sure
        ends: list[Ends] = []
        gone = node.key in self._cancelled
        self._sure = sure and not gone and not (order == "parallel" and join == "first_succeeded")
        for run in children:
            ends.append(run())
            if gone:
                continue  # nobody can say how much of it ran before
            if order == "sequential" and join == "first_succeeded" and ends[-1] == "success":
                break
            if order == "sequential" and join == "all_succeeded" and ends[-1] == "failure":
                break
        self._sure = sure
        status = "CANCELLED" if gone else _status(join, ends)
        if sure:
            self.groups.setdefault(node.key, []).append(status)
        else:
            self.unsure.add(node.key)
        if status == "COMPLETED":
            return self._then(node)
        return "failure" if status in ("FAILED", "CANCELLED") else "neither"


def _status(join: str, ends: list[Ends]) -> str:
    good, bad = "success" in ends, "failure" in ends
    if join == "first_succeeded":
        return "COMPLETED" if good else ("FAILED" if bad else "SKIPPED")
    if join == "any_failed":
        return "COMPLETED" if bad else "SKIPPED"
    return "FAILED" if bad and join == "all_succeeded" else "COMPLETED"


class _Siblings:
    """The children of a group, some of which wait for others."""

    def __init__(self, forecast: Forecast, children: list[Node]) -> None:
        self._forecast = forecast
        self._children = children
        self._own: dict[str, Ends] = {}
        """How each job itself ended, whatever came after it."""

    def run(self, number: int) -> Ends:
        child = self._children[number]
        if not isinstance(child, Job):
            return self._forecast._slot(child)
        needed = "success" if child.needs is None else self._own[child.needs]
        if needed != "success" and child.policy != "run":
            skipped = child.policy == "skip" or needed == "neither"
            self._own[child.key] = "neither" if skipped else "failure"
            return self._own[child.key]
        claimed = child.works and child.key not in self._forecast._cancelled
        self._own[child.key] = "success" if claimed else "failure"
        return self._forecast._slot(child)
