"""A plan: the definitions that one flow can reach from its root, checked as a whole.

A flow keeps its plan, so that changes of definitions never change what is under way.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import (
    MAX_NESTING,
    Condition,
    Control,
    Foreach,
    Goto,
    GroupSpec,
    reference,
    references,
)
from tenuto.model.tasks.submission import NewTask

MAX_PLAN = 20_000
Spec = NewTask | GroupSpec
Lookup = Callable[[str], Spec | None]


class Plan(msgspec.Struct, frozen=True):
    """Everything a flow may activate, by key. A key is a task's or a group's, never both."""

    root: str
    tasks: dict[str, NewTask]
    groups: dict[str, GroupSpec]

    def spec(self, key: str) -> Spec:
        return self.tasks[key] if key in self.tasks else self.groups[key]


def plan_for(root: str, lookup: Lookup) -> Plan:
    """The plan of a flow that starts with `root`; raises `Invalid` where it cannot work."""
    plan = Plan(root, {}, {})
    seen = {root}
    todo = [(root, "the start")]
    while todo:
        key, said_by = todo.pop()
        spec = lookup(key)
        if spec is None:
            raise Invalid(
                f"{said_by} refers to {key!r}, which is not defined", "target_unknown", key=key
            )
        if isinstance(spec, GroupSpec):
            plan.groups[key] = spec
        else:
            plan.tasks[key] = spec
        if len(seen) > MAX_PLAN:
            raise Invalid(f"a flow reaches at most {MAX_PLAN:,} definitions", "too_large")
        for target in targets(spec):
            if target not in seen:
                seen.add(target)
                todo.append((target, repr(key)))
    check_plan(plan)
    return plan


def check_plan(plan: Plan) -> None:
    """Raise `Invalid`, with the keys concerned, unless the plan can be run to an end."""
    homes = _parent_groups(plan)
    _check_cycles(plan)
    _check_nesting(plan, homes)
    _check_dependencies(plan, homes)
    _check_references(plan)


def targets(spec: Spec) -> Iterator[str]:
    """The keys that a definition names as something to run or to wait for."""
    if isinstance(spec, GroupSpec):
        yield from spec.children
        if spec.next is not None:
            yield spec.next
        return
    yield from spec.depends_on
    if spec.control is not None:
        yield from _control_targets(spec.control)
    if spec.next is not None:
        yield spec.next


def _control_targets(control: Control) -> Iterator[str]:
    match control:
        case Foreach():
            yield control.template
        case Goto():
            yield control.target
        case Condition():
            yield from (key for key in (control.on_true, control.on_false) if key is not None)


def _parent_groups(plan: Plan) -> dict[str, str]:
    """The group that each child stands in."""
    homes: dict[str, str] = {}
    for key, group in plan.groups.items():
        for child in group.children:
            if child == key:
                raise Invalid(f"group {key!r} is its own child", "dependency_cycle", key=key)
            if child in homes:
                raise Invalid(
                    f"{child!r} is a child of {homes[child]!r} and of {key!r}",
                    "child_in_two_groups",
                    key=child,
                )
            homes[child] = key
    return homes


def _direct_targets(spec: Spec) -> Iterable[str]:
    """What one leads to but by a jump."""
    if isinstance(spec, GroupSpec) or not isinstance(spec.control, Goto):
        waits = () if isinstance(spec, GroupSpec) else spec.depends_on
        return [key for key in targets(spec) if key not in waits or key == spec.next]
    return [] if spec.next is None else [spec.next]


def _check_cycles(plan: Plan) -> None:
    """Nothing may lead back to itself, by what it names or by who waits for it."""
    onward = {key: list(_direct_targets(plan.spec(key))) for key in (*plan.tasks, *plan.groups)}
    for key, task in plan.tasks.items():
        for needed in task.depends_on:
            onward[needed].append(key)
    circle = find_cycle(onward, onward.__getitem__)
    if circle:
        shown = circle if len(circle) <= 10 else [*circle[:8], "...", circle[-1]]
        raise Invalid(f"these lead back to themselves: {' -> '.join(shown)}", "dependency_cycle")


def find_cycle(nodes: Iterable[str], onward: Callable[[str], Iterable[str]]) -> list[str]:
    """Some circle among the nodes, its first node once more at the end, or nothing."""
    done: set[str] = set()
    for start in sorted(nodes):
        if start in done:
            continue
        path: dict[str, Iterator[str]] = {start: iter(onward(start))}
        while path:
            here = next(reversed(path))
            step = next(path[here], None)
            if step is None:
                path.popitem()
                done.add(here)
            elif step in path:
                circle = list(path)
                return [*circle[circle.index(step) :], step]
            elif step not in done:
                path[step] = iter(onward(step))
    return []


def _check_nesting(plan: Plan, homes: dict[str, str]) -> None:
    for key in plan.groups:
        depth, here = 1, key
        while (above := homes.get(here)) is not None:
            depth, here = depth + 1, above
            if depth > MAX_NESTING:
                raise Invalid(
                    f"groups are nested deeper than {MAX_NESTING}", "nesting_too_deep", key=key
                )


def _check_dependencies(plan: Plan, homes: dict[str, str]) -> None:
    """What a task waits for must be under way by the time it is made."""
    for key, task in plan.tasks.items():
        for needed in task.depends_on:
            if needed not in plan.tasks:
                raise Invalid(f"{key!r} depends on {needed!r}, which is a group", field="dependsOn")
            if homes.get(needed) != homes.get(key) or key not in homes:
                raise Invalid(
                    f"{key!r} depends on {needed!r}, which is not a child of the same group",
                    "dependency_unknown",
                    key=key,
                )
            around = plan.groups[homes[key]]
            if around.order == "sequential":
                place = around.children.index
                if place(needed) > place(key):
                    raise Invalid(
                        f"{key!r} depends on {needed!r}, whose turn comes after its own",
                        "dependency_cycle",
                        key=key,
                    )


def _check_references(plan: Plan) -> None:
    said = {key: _said_results(task) for key, task in plan.tasks.items()}
    if not any(said.values()):
        return
    before = _before(plan)
    for key, wanted in said.items():
        missing = wanted - _reachable(before, key) if wanted else set()
        if missing:
            name = min(missing)
            raise Invalid(
                f"{key!r} refers to the result of {name!r}, which does not come before it",
                "reference_invalid",
                key=key,
            )


def _said_results(task: NewTask) -> set[str]:
    wanted = references(task.input)
    if isinstance(task.control, Foreach) and (known := reference(task.control.items)) is not None:
        wanted.add(known.key)
    return wanted


def _reachable(before: dict[str, set[str]], key: str) -> set[str]:
    found: set[str] = set()
    todo = [key]
    while todo:
        for each in before.get(todo.pop(), ()):
            if each not in found:
                found.add(each)
                todo.append(each)
    return found


def _before(plan: Plan) -> dict[str, set[str]]:
    """For each key what directly precedes it; a group's end is its key with a mark."""
    before: dict[str, set[str]] = {}

    def follows(later: str, earlier: str) -> None:
        before.setdefault(later, set()).add(earlier)

    for key, task in plan.tasks.items():
        for target in targets(task):
            if target in task.depends_on:
                follows(key, target)
            else:
                follows(target, key)
    for key, group in plan.groups.items():
        end = f"{key} ends"
        earlier = key
        for child in group.children:
            follows(child, earlier)
            follows(end, child)
            if child in plan.groups:
                follows(end, f"{child} ends")
            if group.order == "sequential":
                earlier = f"{child} ends" if child in plan.groups else child
        if group.next is not None:
            follows(group.next, end)
    return before
