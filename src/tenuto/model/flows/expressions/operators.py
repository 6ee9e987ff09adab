"""The operators, functions and macros of expressions over JSON, with a limit of steps.

Each part of an expression is a `Step`: a function of the `Evaluation`. Work whose size the author
of an expression can choose is charged in steps before it is done. An evaluation is therefore
bounded in time and memory for every expression. `parser.py` parses the text; docs/expressions.md
describes the language.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from tenuto.model.errors import Invalid

MAX_STEPS = 100_000
CHARACTERS_PER_STEP = 100
# Comparisons of two characters per step; bytes times pattern instructions per step.
SEARCH_PER_STEP = 1_000
# An error that another operand makes irrelevant takes about as long as this many steps.
ERROR_STEPS = 10

MIN_INT, MAX_INT, MAX_INPUT_INT = -(2**63), 2**63 - 1, 2**64 - 1
KINDS: dict[type, str] = {
    bool: "bool",
    int: "int",
    float: "double",
    str: "string",
    list: "list",
    dict: "map",
    type(None): "null",
}
NUMBERS = frozenset({"int", "double"})
ORDERED = frozenset({"string", "bool"})


class EvaluationError(Exception):
    """A part cannot be evaluated. The whole may still have a value: `error || true` is true."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class Evaluation:
    """One evaluation: the values of variables by slot, and the remaining steps."""

    __slots__ = ("remaining_steps", "slots")

    def __init__(self, slots: list[Any]) -> None:
        self.slots = slots
        self.remaining_steps = MAX_STEPS

    def charge(self, steps: int) -> None:
        """Subtracts steps before they are run; raises `Invalid` if too few remain.

        Unlike an `EvaluationError`, this error ends the whole evaluation.
        """
        self.remaining_steps -= steps
        if self.remaining_steps < 0:
            raise Invalid(
                f"the expression takes more than {MAX_STEPS:,} steps", "expression_failed"
            )


Step = Callable[[Evaluation], Any]


def kind_of(value: Any) -> str:
    """Returns CEL's type of a JSON value; `EvaluationError` if not JSON or beyond 64 bits."""
    name = KINDS.get(type(value))
    if name is None:
        raise EvaluationError(f"a {type(value).__name__} is not JSON")
    if name == "int" and not MIN_INT <= value <= MAX_INPUT_INT:
        raise EvaluationError("an integer is beyond 64 bits")
    return name


def require_bool(value: Any, subject: str, position: int | None = None) -> bool:
    """Returns the value; raises `EvaluationError`, naming the subject, if it is not a bool."""
    if isinstance(value, bool):
        return value
    raise EvaluationError(f"{subject} has the type {kind_of(value)}, not bool", position)


def quote(text: str) -> str:
    """Returns the beginning of the text in quotes, on one line, for a message."""
    line = "".join(char if char.isprintable() else "\ufffd" for char in text[:40])
    return f'"{line}"' if len(text) <= 40 else f'"{line}…"'


def raise_type_mismatch(function: str, *values: Any) -> NoReturn:
    """Raises `EvaluationError` with the types of the values."""
    raise EvaluationError(f'"{function}" cannot be applied to {" and ".join(map(kind_of, values))}')


def require_int64(value: int) -> int:
    """Returns the value; raises `EvaluationError` if it is beyond 64 bits."""
    if MIN_INT <= value <= MAX_INT:
        return value
    raise EvaluationError("the result is beyond 64 bits")


def arithmetic(
    sign: str,
    on_ints: Callable[[int, int], int],
    on_doubles: Callable[[float, float], float] | None,
) -> Callable[[Evaluation, Any, Any], Any]:
    """Returns the operator's function; a double converts both sides, other types are an error."""

    def apply(_: Evaluation, left: Any, right: Any) -> Any:
        kinds = {kind_of(left), kind_of(right)}
        if kinds == {"int"}:
            return require_int64(on_ints(left, right))
        if kinds <= NUMBERS and on_doubles is not None:
            return on_doubles(float(left), float(right))
        raise_type_mismatch(sign, left, right)

    return apply


def quotient(left: int, right: int) -> int:
    """Returns the integer quotient, rounded towards zero; `EvaluationError` if `right` is 0."""
    if right == 0:
        raise EvaluationError("division by zero")
    result = abs(left) // abs(right)
    return result if (left < 0) == (right < 0) else -result


def remainder(left: int, right: int) -> int:
    """Returns the remainder, with the sign of `left`; `EvaluationError` if `right` is 0."""
    return left - right * quotient(left, right)


def ratio(left: float, right: float) -> float:
    """Returns the quotient by IEEE 754: division by zero gives infinity or NaN."""
    if right != 0:
        return left / right
    if left == 0 or math.isnan(left) or math.isnan(right):
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1.0, right)


add_numbers = arithmetic("+", operator.add, operator.add)


def add(evaluation: Evaluation, left: Any, right: Any) -> Any:
    """Returns the sum of numbers, or texts or lists joined; `EvaluationError` for other types."""
    kinds = {kind_of(left), kind_of(right)}
    if kinds == {"string"}:
        evaluation.charge((len(left) + len(right)) // CHARACTERS_PER_STEP)
        return left + right
    if kinds == {"list"}:
        evaluation.charge(len(left) + len(right))
        return left + right
    return add_numbers(evaluation, left, right)


def negate(_: Evaluation, value: Any) -> Any:
    if kind_of(value) not in NUMBERS:
        raise_type_mismatch("-", value)
    return -value if isinstance(value, float) else require_int64(-value)


def logical_not(_: Evaluation, value: Any) -> bool:
    if not isinstance(value, bool):
        raise_type_mismatch("!", value)
    return not value


def equal(evaluation: Evaluation, left: Any, right: Any) -> bool:
    """True if two values are equal: numbers by value, other values only within one kind.

    It uses its own stack instead of recursion, so that the depth of a variable is not limited.
    """
    pairs = [(left, right)]
    while pairs:
        first, second = pairs.pop()
        evaluation.charge(1)
        first_kind, second_kind = kind_of(first), kind_of(second)
        if first_kind != second_kind and not {first_kind, second_kind} <= NUMBERS:
            return False
        if first_kind in {"list", "map", "string"}:
            if len(first) != len(second):
                return False
            evaluation.charge(
                len(first) // CHARACTERS_PER_STEP if first_kind == "string" else len(first)
            )
        if first_kind == "list":
            pairs += zip(first, second, strict=True)
        elif first_kind == "map":
            if first.keys() != second.keys():
                return False
            pairs += [(first[key], second[key]) for key in first]
        elif first != second:
            return False
    return True


def unequal(evaluation: Evaluation, left: Any, right: Any) -> bool:
    return not equal(evaluation, left, right)


def ordering(sign: str, test: Callable[[Any, Any], bool]) -> Callable[[Evaluation, Any, Any], bool]:
    """Returns the comparison `sign`, of numbers or of two values of the same ordered kind."""

    def apply(evaluation: Evaluation, left: Any, right: Any) -> bool:
        left_kind, right_kind = kind_of(left), kind_of(right)
        if not (left_kind == right_kind in ORDERED or {left_kind, right_kind} <= NUMBERS):
            raise_type_mismatch(sign, left, right)
        if left_kind == "string":
            evaluation.charge(min(len(left), len(right)) // CHARACTERS_PER_STEP)
        return test(left, right)

    return apply


def is_in(evaluation: Evaluation, item: Any, container: Any) -> bool:
    """True if a list contains the item, or a map has it as a key."""
    container_kind = kind_of(container)
    if container_kind == "map":
        return kind_of(item) == "string" and item in container
    if container_kind != "list":
        raise_type_mismatch("in", item, container)
    return any(equal(evaluation, item, element) for element in container)


def select(_: Evaluation, container: Any, field: str) -> Any:
    """Returns a map's field; raises `EvaluationError` if it has none."""
    if kind_of(container) != "map":
        raise EvaluationError(f"{kind_of(container)} has no field {quote(field)}")
    if field not in container:
        raise EvaluationError(f"there is no field {quote(field)}")
    return container[field]


def index(evaluation: Evaluation, container: Any, key: Any) -> Any:
    """Returns a list's element or a map's entry; raises `EvaluationError` if it is missing."""
    container_kind, key_kind = kind_of(container), kind_of(key)
    if container_kind == "map" and key_kind == "string":
        return select(evaluation, container, key)
    if container_kind != "list" or key_kind not in NUMBERS or key != key // 1:
        raise_type_mismatch("[]", container, key)
    if not 0 <= key < len(container):
        raise EvaluationError(f"there is no element {int(key)} in a list of {len(container):,}")
    return container[int(key)]


def require_strings(function: str, *values: Any) -> None:
    """Raises `EvaluationError` unless all values are strings."""
    if any(kind_of(value) != "string" for value in values):
        raise_type_mismatch(function, *values)


def contains(evaluation: Evaluation, text: Any, part: Any) -> bool:
    """True if the text contains the part.

    Python's search is linear, except for short parts or texts, where it may try every position.
    """
    require_strings("contains", text, part)
    comparisons = min(len(part), 100 if len(text) < 30_000 else 6)
    evaluation.charge(len(text) * comparisons // SEARCH_PER_STEP)
    evaluation.charge((len(text) + len(part)) // CHARACTERS_PER_STEP)
    return part in text


def starts_with(evaluation: Evaluation, text: Any, part: Any) -> bool:
    require_strings("startsWith", text, part)
    evaluation.charge(len(part) // CHARACTERS_PER_STEP)
    return bool(text.startswith(part))


def ends_with(evaluation: Evaluation, text: Any, part: Any) -> bool:
    require_strings("endsWith", text, part)
    evaluation.charge(len(part) // CHARACTERS_PER_STEP)
    return bool(text.endswith(part))


def size(_: Evaluation, value: Any) -> int:
    """Returns the number of characters, elements or entries; `EvaluationError` for other types."""
    if kind_of(value) not in {"string", "list", "map"}:
        raise_type_mismatch("size", value)
    return len(value)


def to_int(_: Evaluation, value: Any) -> int:
    """Converts a number, dropping its fraction, or a decimal text; else `EvaluationError`."""
    value_kind = kind_of(value)
    if value_kind == "int":
        return require_int64(value)
    if value_kind == "double" and abs(value) < 2**63:
        return int(value)
    if value_kind == "string" and re.fullmatch(r"-?[0-9]{1,19}", value):
        return require_int64(int(value))
    raise EvaluationError(f"{quote(value) if value_kind == 'string' else value_kind} is not an int")


def to_double(_: Evaluation, value: Any) -> float:
    """Converts a number or a decimal text; else `EvaluationError`."""
    value_kind = kind_of(value)
    if value_kind in NUMBERS:
        return float(value)
    if value_kind == "string" and re.fullmatch(
        r"-?[0-9]{1,99}(\.[0-9]{1,99})?(e-?[0-9]{1,3})?", value
    ):
        return float(value)
    raise EvaluationError(
        f"{quote(value) if value_kind == 'string' else value_kind} is not a double"
    )


def to_string(_: Evaluation, value: Any) -> str:
    """Converts a bool, an integer or a string; else `EvaluationError`."""
    value_kind = kind_of(value)
    if value_kind == "bool":
        return "true" if value else "false"
    if value_kind not in {"string", "int"}:
        raise_type_mismatch("string", value)
    return str(value)


UNARY: dict[str, Callable[[Evaluation, Any], Any]] = {"!": logical_not, "-": negate}
BINARY: dict[str, Callable[[Evaluation, Any, Any], Any]] = {
    "==": equal,
    "!=": unequal,
    "<": ordering("<", operator.lt),
    "<=": ordering("<=", operator.le),
    ">": ordering(">", operator.gt),
    ">=": ordering(">=", operator.ge),
    "in": is_in,
    "+": add,
    "-": arithmetic("-", operator.sub, operator.sub),
    "*": arithmetic("*", operator.mul, operator.mul),
    "/": arithmetic("/", quotient, ratio),
    "%": arithmetic("%", remainder, None),
}
FUNCTIONS: dict[str, Callable[[Evaluation, Any], Any]] = {
    "size": size,
    "int": to_int,
    "double": to_double,
    "string": to_string,
}
METHODS: dict[str, tuple[int, Callable[..., Any]]] = {
    "size": (0, size),
    "contains": (1, contains),
    "startsWith": (1, starts_with),
    "endsWith": (1, ends_with),
}


def operation(function: Callable[..., Any], position: int, *operands: Step) -> Step:
    """Returns a step that applies the function to the values of all operands.

    An error of the function gets the position.
    """

    def step(evaluation: Evaluation) -> Any:
        evaluation.charge(1)
        values = [operand(evaluation) for operand in operands]
        try:
            return function(evaluation, *values)
        except EvaluationError as error:
            error.position = position
            raise

    return step


def constant(value: Any) -> Step:
    """Returns a step that always has this value."""
    return lambda _: value


def variable(slot: int) -> Step:
    """Returns a step whose value is that of the variable in the slot."""
    return lambda evaluation: evaluation.slots[slot]


def field_of(position: int, container: Step, field: str) -> Step:
    """Returns a step that selects a field of a map."""
    return operation(select, position, container, constant(field))


def has_field(position: int, container: Step, field: str) -> Step:
    """Returns a step that is true if the map has the field, and an error if it is no map."""

    def test(_: Evaluation, value: Any) -> bool:
        if kind_of(value) != "map":
            raise EvaluationError(f"{kind_of(value)} has no field {quote(field)}")
        return field in value

    return operation(test, position, container)


def list_of(elements: list[Step]) -> Step:
    """Returns a step that builds a list."""

    def step(evaluation: Evaluation) -> list[Any]:
        evaluation.charge(1 + len(elements))
        return [element(evaluation) for element in elements]

    return step


def map_of(position: int, entries: list[tuple[Step, Step]]) -> Step:
    """Returns a step that builds a map; its keys must be distinct strings."""

    def step(evaluation: Evaluation) -> dict[str, Any]:
        evaluation.charge(1 + len(entries))
        result: dict[str, Any] = {}
        for key, value in entries:
            name = key(evaluation)
            if kind_of(name) != "string":
                raise EvaluationError(f"a key of a map is {kind_of(name)}, not string", position)
            if name in result:
                raise EvaluationError(f"the key {quote(name)} is twice in a map", position)
            result[name] = value(evaluation)
        return result

    return step


def conditional(position: int, condition: Step, yes: Step, no: Step) -> Step:
    """Returns a step that evaluates `yes` or `no`, depending on the condition."""

    def step(evaluation: Evaluation) -> Any:
        evaluation.charge(1)
        return (
            yes if require_bool(condition(evaluation), 'the left side of "?"', position) else no
        )(evaluation)

    return step


def evaluate_short_circuit(
    evaluation: Evaluation, position: int, steps: Iterable[Step], stop_value: bool
) -> bool:
    """Returns `stop_value` as soon as a step has this value, even if others raised errors.

    Otherwise it raises the first error, or returns the opposite of `stop_value`.
    """
    first_error: EvaluationError | None = None
    for step in steps:
        try:
            if require_bool(step(evaluation), "a condition", position) is stop_value:
                return stop_value
        except EvaluationError as error:
            evaluation.charge(ERROR_STEPS)
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return not stop_value


def logical(position: int, operands: list[Step], stop_value: bool) -> Step:
    """Returns a step for `||` if `stop_value` is true, for `&&` if it is false."""

    def step(evaluation: Evaluation) -> bool:
        evaluation.charge(1)
        return evaluate_short_circuit(evaluation, position, operands, stop_value)

    return step


class Macro:
    """A loop over the elements of a list or the keys of a map, one after another in the slot."""

    def __init__(self, position: int, container: Step, slot: int, bodies: list[Step]) -> None:
        self.position, self.container, self.slot, self.bodies = position, container, slot, bodies

    def elements(self, evaluation: Evaluation) -> Iterator[Any]:
        """Yields each element or key, after charging steps and storing it in the variable."""
        container = self.container(evaluation)
        if kind_of(container) not in {"list", "map"}:
            raise EvaluationError(f"{kind_of(container)} has no elements", self.position)
        for element in container:
            evaluation.charge(2)
            evaluation.slots[self.slot] = element
            yield element

    def test(self, evaluation: Evaluation) -> bool:
        """True if the condition holds for the element in the slot."""
        return require_bool(self.bodies[0](evaluation), "a condition", self.position)

    def all(self, evaluation: Evaluation) -> bool:
        """True if the condition holds for all elements; a false one decides, even after errors."""
        return evaluate_short_circuit(
            evaluation,
            self.position,
            (self.bodies[0] for _ in self.elements(evaluation)),
            stop_value=False,
        )

    def exists(self, evaluation: Evaluation) -> bool:
        """True if the condition holds for an element; a true one decides, even after errors."""
        return evaluate_short_circuit(
            evaluation,
            self.position,
            (self.bodies[0] for _ in self.elements(evaluation)),
            stop_value=True,
        )

    def exists_one(self, evaluation: Evaluation) -> bool:
        return sum(self.test(evaluation) for _ in self.elements(evaluation)) == 1

    def filter(self, evaluation: Evaluation) -> list[Any]:
        return [element for element in self.elements(evaluation) if self.test(evaluation)]

    def map(self, evaluation: Evaluation) -> list[Any]:
        """Returns the values of the last body; with two bodies, the first one is a condition."""
        if len(self.bodies) == 1:
            return [self.bodies[0](evaluation) for _ in self.elements(evaluation)]
        return [
            self.bodies[1](evaluation) for _ in self.elements(evaluation) if self.test(evaluation)
        ]


# By name: the allowed numbers of arguments after the variable, and the function.
MACROS: dict[str, tuple[set[int], Callable[[Macro, Evaluation], Any]]] = {
    "all": ({1}, Macro.all),
    "exists": ({1}, Macro.exists),
    "exists_one": ({1}, Macro.exists_one),
    "filter": ({1}, Macro.filter),
    "map": ({1, 2}, Macro.map),
}
