"""Errors: one tree, complete maps, and codes that are documented and used."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tenuto.model import errors
from tenuto.model.errors import CODES, EXIT_CODE, HTTP_STATUS, TenutoError, status_for_error

SOURCE = Path(errors.__file__).parents[1]


def subclasses(of: type[TenutoError]) -> Iterator[type[TenutoError]]:
    for child in of.__subclasses__():
        yield child
        yield from subclasses(child)


KINDS = list(subclasses(TenutoError))


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def constants(tree: ast.Module) -> dict[str, str]:
    """Text that the module gives a name."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def raised_codes() -> Iterator[tuple[str, str]]:
    """Each code that an error is made with, and where."""
    names = {kind.__name__ for kind in KINDS}
    for path, tree in trees():
        existing = constants(tree)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name not in names:
                continue
            values = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "code")]
            for code in values:
                if isinstance(code, ast.Constant) and isinstance(code.value, str):
                    yield code.value, f"{path.name}:{node.lineno}"
                elif isinstance(code, ast.Name) and code.id in existing:
                    yield existing[code.id], f"{path.name}:{node.lineno}"


@cache
def used_codes() -> frozenset[str]:
    """Every text in the source but the keys of the table of codes itself."""
    words: set[str] = set()
    for path, tree in trees():
        table: set[int] = set()
        if path == Path(errors.__file__):
            for node in ast.walk(tree):
                if isinstance(node, ast.Dict):
                    table |= {id(key) for key in node.keys}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= {node.value} if id(node) not in table else set()
    return frozenset(words)


def test_every_error_kind_is_in_both_maps() -> None:
    assert set(HTTP_STATUS) == set(EXIT_CODE) == set(KINDS)
    for kind in KINDS:
        error = kind("said in one sentence")
        assert 400 <= status_for_error(HTTP_STATUS, error) <= 599
        assert 1 <= status_for_error(EXIT_CODE, error) <= 125


def test_every_default_code_is_documented() -> None:
    kinds: list[type[TenutoError]] = [TenutoError, *KINDS]
    for kind in kinds:
        assert kind.default_code in CODES
        assert kind("m").code == kind.default_code


def test_every_code_in_use_is_documented() -> None:
    result = dict(raised_codes())
    assert len(result) > 10
    assert {code: position for code, position in result.items() if code not in CODES} == {}


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_documented_code_is_in_use(code: str) -> None:
    assert code in used_codes()


def test_every_code_is_explained_in_a_sentence() -> None:
    for code, meaning in CODES.items():
        assert code == code.lower()
        assert meaning[0].isupper()
        assert meaning.endswith(".")
        assert "\n" not in meaning


def test_undocumented_code_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="made_up"):
        TenutoError("m", "made_up")


def test_text_of_an_error_is_its_message() -> None:
    error = TenutoError("what happened", "internal", task="t")
    assert str(error) == error.message == "what happened"
    assert error.details == {"task": "t"}
