"""Plans: all definitions that a flow can reach from its root, checked together.

A flow stores its plan, so that later changes of definitions do not affect a running flow.
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
    parse_reference,
    referenced_keys,
)
from tenuto.model.tasks.submission import NewTask

MAX_PLAN = 20_000
Spec = NewTask | GroupSpec
Lookup = Callable[[str], Spec | None]


class Plan(msgspec.Struct, frozen=True):
    """The definitions that a flow may activate, by key. A key names a task or a group, not both."""

    root: str
    tasks: dict[str, NewTask]
    groups: dict[str, GroupSpec]

    def spec(self, key: str) -> Spec:
        """Returns the definition of a task or group."""
        return self.tasks[key] if key in self.tasks else self.groups[key]


def build_plan(root: str, lookup: Lookup) -> Plan:
    """Returns the plan of all that `root` reaches; `Invalid` if one is missing or it cannot run."""
    plan = Plan(root, {}, {})
    seen = {root}
    pending = [(root, "the start")]
    while pending:
        key, referrer = pending.pop()
        spec = lookup(key)
        if spec is None:
            raise Invalid(
                f"{referrer} refers to {key!r}, which is not defined", "target_unknown", key=key
            )
        if isinstance(spec, GroupSpec):
            plan.groups[key] = spec
        else:
            plan.tasks[key] = spec
        if len(seen) > MAX_PLAN:
            raise Invalid(f"a flow reaches at most {MAX_PLAN:,} definitions", "too_large")
        for target in target_keys(spec):
            if target not in seen:
                seen.add(target)
                pending.append((target, repr(key)))
    check_plan(plan)
    return plan


def check_plan(plan: Plan) -> None:
    """Raises `Invalid`, with the keys concerned, unless the plan can run and finish."""
    parents = _parent_groups(plan)
    _check_cycles(plan)
    _check_nesting(plan, parents)
    _check_dependencies(plan, parents)
    _check_references(plan)


def target_keys(spec: Spec) -> Iterator[str]:
    """Yields the keys that a definition runs or waits for."""
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
    """Yields the keys that a control task can run next."""
    match control:
        case Foreach():
            yield control.template
        case Goto():
            yield control.target
        case Condition():
            yield from (key for key in (control.on_true, control.on_false) if key is not None)


def _parent_groups(plan: Plan) -> dict[str, str]:
    """Returns each child's group, as keys; `Invalid` for a child of two groups or of itself."""
    parents: dict[str, str] = {}
    for key, group in plan.groups.items():
        for child in group.children:
            if child == key:
                raise Invalid(f"group {key!r} is its own child", "dependency_cycle", key=key)
            if child in parents:
                raise Invalid(
                    f"{child!r} is a child of {parents[child]!r} and of {key!r}",
                    "child_in_two_groups",
                    key=child,
                )
            parents[child] = key
    return parents


def _direct_targets(spec: Spec) -> Iterable[str]:
    """Returns the keys that a definition runs: not its dependencies, nor the target of a `goto`."""
    if isinstance(spec, GroupSpec) or not isinstance(spec.control, Goto):
        dependencies = () if isinstance(spec, GroupSpec) else spec.depends_on
        return [key for key in target_keys(spec) if key not in dependencies or key == spec.next]
    return [] if spec.next is None else [spec.next]


def _check_cycles(plan: Plan) -> None:
    """Raises `Invalid` if definitions form a cycle by targets (not gotos) or by dependencies."""
    successors = {key: list(_direct_targets(plan.spec(key))) for key in (*plan.tasks, *plan.groups)}
    for key, task in plan.tasks.items():
        for dependency in task.depends_on:
            successors[dependency].append(key)
    cycle = find_cycle(successors, successors.__getitem__)
    if cycle:
        shown = cycle if len(cycle) <= 10 else [*cycle[:8], "...", cycle[-1]]
        raise Invalid(f"cyclic definitions: {' -> '.join(shown)}", "dependency_cycle")


def find_cycle(nodes: Iterable[str], successors: Callable[[str], Iterable[str]]) -> list[str]:
    """Returns one cycle among the nodes, its first node repeated at the end, or an empty list."""
    done: set[str] = set()
    for start in sorted(nodes):
        if start in done:
            continue
        path: dict[str, Iterator[str]] = {start: iter(successors(start))}
        while path:
            current = next(reversed(path))
            successor = next(path[current], None)
            if successor is None:
                path.popitem()
                done.add(current)
            elif successor in path:
                keys = list(path)
                return [*keys[keys.index(successor) :], successor]
            elif successor not in done:
                path[successor] = iter(successors(successor))
    return []


def _check_nesting(plan: Plan, parents: dict[str, str]) -> None:
    """Raises `Invalid` if groups are nested too deeply; `parents` has each child's group."""
    for key in plan.groups:
        depth, current = 1, key
        while (parent := parents.get(current)) is not None:
            depth, current = depth + 1, parent
            if depth > MAX_NESTING:
                raise Invalid(
                    f"groups are nested deeper than {MAX_NESTING}", "nesting_too_deep", key=key
                )


def _check_dependencies(plan: Plan, parents: dict[str, str]) -> None:
    """Raises `Invalid` unless each dependency is a task of the same group that can run earlier."""
    for key, task in plan.tasks.items():
        for dependency in task.depends_on:
            if dependency not in plan.tasks:
                raise Invalid(
                    f"{key!r} depends on {dependency!r}, which is a group", field="dependsOn"
                )
            if parents.get(dependency) != parents.get(key) or key not in parents:
                raise Invalid(
                    f"{key!r} depends on {dependency!r}, which is not a child of the same group",
                    "dependency_unknown",
                    key=key,
                )
            group = plan.groups[parents[key]]
            if group.order == "sequential":
                position_of = group.children.index
                if position_of(dependency) > position_of(key):
                    raise Invalid(
                        f"{key!r} depends on {dependency!r}, which runs after it in a sequence",
                        "dependency_cycle",
                        key=key,
                    )


def _check_references(plan: Plan) -> None:
    """Raises `Invalid` if a task refers to the result of a task that does not come before it."""
    references = {key: _referenced_results(task) for key, task in plan.tasks.items()}
    if not any(references.values()):
        return
    predecessors = _direct_predecessors(plan)
    for key, required in references.items():
        missing = required - _all_predecessors(predecessors, key) if required else set()
        if missing:
            name = min(missing)
            raise Invalid(
                f"{key!r} refers to the result of {name!r}, which does not come before it",
                "reference_invalid",
                key=key,
            )


def _referenced_results(task: NewTask) -> set[str]:
    """Returns the keys of tasks whose results a task's input or foreach list refers to."""
    keys = referenced_keys(task.input)
    if (
        isinstance(task.control, Foreach)
        and (reference := parse_reference(task.control.items)) is not None
    ):
        keys.add(reference.key)
    return keys


def _all_predecessors(predecessors: dict[str, set[str]], key: str) -> set[str]:
    """Returns the direct and indirect predecessors of a key."""
    reached: set[str] = set()
    pending = [key]
    while pending:
        for predecessor in predecessors.get(pending.pop(), ()):
            if predecessor not in reached:
                reached.add(predecessor)
                pending.append(predecessor)
    return reached


def _direct_predecessors(plan: Plan) -> dict[str, set[str]]:
    """Returns for each key its direct predecessors; the end of a group is the node `KEY ends`."""
    predecessors: dict[str, set[str]] = {}

    def add_edge(later: str, earlier: str) -> None:
        predecessors.setdefault(later, set()).add(earlier)

    for key, task in plan.tasks.items():
        for target in target_keys(task):
            if target in task.depends_on:
                add_edge(key, target)
            else:
                add_edge(target, key)
    for key, group in plan.groups.items():
        end = f"{key} ends"
        earlier = key
        for child in group.children:
            add_edge(child, earlier)
            add_edge(end, child)
            if child in plan.groups:
                add_edge(end, f"{child} ends")
            if group.order == "sequential":
                earlier = f"{child} ends" if child in plan.groups else child
        if group.next is not None:
            add_edge(group.next, end)
    return predecessors
