"""The blocking client has the names, arguments and results of the async one."""

import ast
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from types import GenericAlias, UnionType
from typing import Any, assert_type, get_args, get_origin
from uuid import UUID

import generate_blocking
import pytest

from tenuto import AsyncClient, Client
from tenuto.client import blocking
from tenuto.client.background_loop import BackgroundLoop, BlockingResource
from tenuto.client.client import Stats
from tenuto.client.follow import TaskEvent
from tenuto.engine.views import TaskSummary, TaskView

REST = inspect.Parameter.VAR_KEYWORD
NOT_BLOCKING = {"engine", "open"}
"""What a program that does not await has no use for."""


def public(kind: type) -> dict[str, Any]:
    return {name: result for name, result in inspect.getmembers(kind) if not name.startswith("_")}


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {name: result for name, result in public(kind).items() if inspect.isfunction(result)}


def awaited(annotation: Any) -> Any:
    """Returns the type that a blocking method must return for the awaited annotation."""
    if get_origin(annotation) is AsyncGenerator:
        return GenericAlias(Generator, (get_args(annotation)[0], None, None))
    return annotation


def drifted(kinds: Sequence[type], twin: type) -> list[str]:
    """Returns how a blocking class differs from the async ones; names common to all count."""
    ours = methods(twin)
    common = set.intersection(*(set(methods(kind)) for kind in kinds))
    matches = [f"{name} is on one side only" for name in sorted(set(ours) ^ common)]
    for name in sorted(set(ours) & common):
        own = inspect.signature(ours[name])
        for kind in kinds:
            other = inspect.signature(getattr(kind, name))
            if list(own.parameters.values()) != list(other.parameters.values()):
                matches.append(f"{name} takes something else")
            if own.return_annotation != awaited(other.return_annotation):
                matches.append(f"{name} answers something else")
    return matches


def groups() -> dict[type, Sequence[type]]:
    """Each group of methods that blocks, with the awaited ones that it may stand for."""
    result: dict[type, Sequence[type]] = {}
    for name, attribute in public(AsyncClient).items():
        if isinstance(attribute, property) and hasattr(Client, name):
            kinds = inspect.signature(attribute.fget).return_annotation  # type: ignore[arg-type]
            twin = inspect.signature(getattr(Client, name).fget).return_annotation
            result[twin] = get_args(kinds) if isinstance(kinds, UnionType) else (kinds,)
    return result


def name_of(twin: object) -> str:
    return twin.__name__ if isinstance(twin, type) else ""


@pytest.mark.parametrize(("twin", "kinds"), groups().items(), ids=name_of)
def test_blocking_resource_has_the_same_methods(twin: type, kinds: Sequence[type]) -> None:
    assert drifted(kinds, twin) == []


def test_every_resource_is_compared() -> None:
    every = {var for var in vars(blocking).values() if inspect.isclass(var)}
    existing = {
        item
        for item in every
        if issubclass(item, BlockingResource) and item is not BlockingResource
    }
    assert set(groups()) == existing


def test_added_async_method_changes_the_generated_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parse_source = generate_blocking.parse
    source = '''
    async def count(self, name: str = "A", *, limit: int = 1) -> AsyncGenerator[ID, None]:
        """Yields counts.

        Not this line.
        """
        yield name
'''

    def parse(module: str) -> ast.Module:
        tree = parse_source(module)
        if module == "tenuto.client.tasks":
            tree = ast.parse(ast.unparse(tree).replace("class Tasks:", f"class Tasks:{source}", 1))
        return tree

    before = generate_blocking.blocking_module()
    assert before == (generate_blocking.ROOT / generate_blocking.TARGET).read_text("utf-8")
    monkeypatch.setattr(generate_blocking, "parse", parse)
    added = set(generate_blocking.blocking_module().splitlines()) - set(before.splitlines())
    assert added == {
        '    def count(self, name: str = "A", *, limit: int = 1) -> Generator[ID, None, None]:',
        '        """Yields counts."""',
        "        return self._iterate(self._resource.count(name, limit=limit))",
    }


def test_blocking_client_has_the_same_names() -> None:
    assert set(public(Client)) == set(public(AsyncClient)) - NOT_BLOCKING | {"target"}
    for name in set(methods(Client)) - {"close"}:
        ours, theirs = (inspect.signature(getattr(item, name)) for item in (Client, AsyncClient))
        assert ours == theirs, name


def test_difference_between_clients_is_detected() -> None:
    class Awaited:
        async def same(self, task: UUID) -> int: ...  # type: ignore[empty-body]

        async def gone(self) -> None: ...

        async def takes(self, task: UUID, limit: int = 1) -> None: ...

        async def answers(self) -> AsyncGenerator[int, None]: ...  # type: ignore[empty-body]

    class Blocks:
        def same(self, task: UUID) -> int: ...  # type: ignore[empty-body]

        def takes(self, task: UUID, limit: int = 2) -> None: ...

        def answers(self) -> Generator[str, None, None]: ...  # type: ignore[empty-body]

    assert drifted([Awaited], Blocks) == [
        "gone is on one side only",
        "answers answers something else",
        "takes takes something else",
    ]


class Recorder:
    """An awaited group that answers what it was called with."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._kind, name)

        def called(*args: Any, **fields: Any) -> dict[str, Any]:
            bound = inspect.signature(method).bind(None, *args, **fields).arguments
            return {"called": name} | {key: bound[key] for key in bound if key != "self"}

        if inspect.isasyncgenfunction(method):

            async def items(*args: Any, **fields: Any) -> AsyncGenerator[Any, None]:
                yield called(*args, **fields)

            return items

        async def answer(*args: Any, **fields: Any) -> Any:
            return called(*args, **fields)

        return answer


@pytest.mark.parametrize(("twin", "kinds"), groups().items(), ids=name_of)
def test_blocking_method_passes_every_argument(twin: type, kinds: Sequence[type]) -> None:
    waiter = BackgroundLoop()
    group = twin(waiter, Recorder(kinds[0]))
    for name, method in methods(twin).items():
        _, *parameters = inspect.signature(method).parameters.values()
        plain = {
            parameter.name: f"any {parameter.name}"
            for parameter in parameters
            if parameter.kind is not REST
        }
        rest = {parameter.name: {"other": 1} for parameter in parameters if parameter.kind is REST}
        reported = getattr(group, name)(**plain, **({"other": 1} if rest else {}))
        if not isinstance(reported, dict):
            [reported] = reported
        assert reported == {"called": name} | plain | rest
    waiter.close()


def test_client_methods_have_return_types(tmp_path: Any) -> None:
    with Client(f"sqlite:///{tmp_path}/t.db") as client:
        created = assert_type(client.tasks.create("x"), TaskView)
        listed = assert_type(client.tasks.list(), Generator[TaskSummary, None, None])
        assert [item.id for item in listed] == [created.id]
        events = assert_type(client.tasks.follow(created.id), Generator[TaskEvent, None, None])
        events.close()
        assert assert_type(client.stats(), Stats).tasks["PENDING"] == 1
