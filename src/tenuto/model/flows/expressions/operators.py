"""What the operators, functions and macros of an expression do to JSON, each paid in steps.

A part of an expression is a `Step`, a function of the `Run`. Whatever an author can make large is
paid for before it is done, so a run is bounded in time and in memory whatever was written. Reading
the text is model/flows/expressions/parser.py; the language is described in docs/expressions.md.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from tenuto.model.errors import Invalid

MAX_STEPS = 100_000
CHARACTERS_PER_STEP = 100
# Of comparing one character with one other, and of moving one byte past one instruction.
SEARCH_PER_STEP = 1_000
PATTERN_PER_STEP = 200
PATTERN_MEMORY = 256 * 1024
# An error that another operand makes harmless takes about as long as so many steps.
FAULT_STEPS = 10

LEAST_INT, MOST_INT, MOST_READ = -(2**63), 2**63 - 1, 2**64 - 1
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
    """A part has no answer. The whole may have one: `fault || true` is true."""

    def __init__(self, message: str, place: int | None = None) -> None:
        super().__init__(message)
        self.place = place


class Evaluation:
    """One evaluation: the values by slot, and the steps that are left."""

    __slots__ = ("left", "slots")

    def __init__(self, slots: list[Any]) -> None:
        self.slots = slots
        self.left = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Pay before the work is done; no operand makes up for a budget that is used up."""
        self.left -= steps
        if self.left < 0:
            raise Invalid(
                f"the expression takes more than {MAX_STEPS:,} steps", "expression_failed"
            )


Step = Callable[[Evaluation], Any]


def kind(value: Any) -> str:
    """What CEL calls the type of a JSON value."""
    found = KINDS.get(type(value))
    if found is None:
        raise EvaluationError(f"a {type(value).__name__} is not JSON")
    if found == "int" and not LEAST_INT <= value <= MOST_READ:
        raise EvaluationError("an integer is beyond 64 bits")
    return found


def truth(value: Any, of: str, place: int | None = None) -> bool:
    if isinstance(value, bool):
        return value
    raise EvaluationError(f"{of} gives {kind(value)}, not true or false", place)


def shown(text: str) -> str:
    """The text for a message: its beginning, on one line."""
    line = "".join(char if char.isprintable() else "\ufffd" for char in text[:40])
    return f'"{line}"' if len(text) <= 40 else f'"{line}…"'


def misfit(what: str, *values: Any) -> NoReturn:
    raise EvaluationError(f'"{what}" cannot be applied to {" and ".join(map(kind, values))}')


def in_range(value: int) -> int:
    if LEAST_INT <= value <= MOST_INT:
        return value
    raise EvaluationError("the result is beyond 64 bits")


def arithmetic(
    sign: str, whole: Callable[[int, int], int], real: Callable[[float, float], float] | None
) -> Callable[[Evaluation, Any, Any], Any]:
    """The operator over numbers; a double on either side makes both doubles."""

    def apply(_: Evaluation, left: Any, right: Any) -> Any:
        kinds = {kind(left), kind(right)}
        if kinds == {"int"}:
            return in_range(whole(left, right))
        if kinds <= NUMBERS and real is not None:
            return real(float(left), float(right))
        misfit(sign, left, right)

    return apply


def quotient(left: int, right: int) -> int:
    """Division towards zero."""
    if right == 0:
        raise EvaluationError("division by zero")
    result = abs(left) // abs(right)
    return result if (left < 0) == (right < 0) else -result


def remainder(left: int, right: int) -> int:
    """What division towards zero leaves: it has the sign of the left side."""
    return left - right * quotient(left, right)


def ratio(left: float, right: float) -> float:
    """Division as IEEE 754 has it."""
    if right != 0:
        return left / right
    if left == 0 or math.isnan(left) or math.isnan(right):
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1.0, right)


add_numbers = arithmetic("+", operator.add, operator.add)


def add(run: Evaluation, left: Any, right: Any) -> Any:
    kinds = {kind(left), kind(right)}
    if kinds == {"string"}:
        run.spend((len(left) + len(right)) // CHARACTERS_PER_STEP)
        return left + right
    if kinds == {"list"}:
        run.spend(len(left) + len(right))
        return left + right
    return add_numbers(run, left, right)


def negate(_: Evaluation, value: Any) -> Any:
    if kind(value) not in NUMBERS:
        misfit("-", value)
    return -value if isinstance(value, float) else in_range(-value)


def refuse(_: Evaluation, value: Any) -> bool:
    if not isinstance(value, bool):
        misfit("!", value)
    return not value


def equal(run: Evaluation, left: Any, right: Any) -> bool:
    """Equality of values; numbers are equal by value, other kinds never across kinds.

    It keeps its own stack: the depth of a variable is not the author's to be limited by.
    """
    pairs = [(left, right)]
    while pairs:
        one, two = pairs.pop()
        run.spend(1)
        sort, other = kind(one), kind(two)
        if sort != other and not {sort, other} <= NUMBERS:
            return False
        if sort in {"list", "map", "string"}:
            if len(one) != len(two):
                return False
            run.spend(len(one) // CHARACTERS_PER_STEP if sort == "string" else len(one))
        if sort == "list":
            pairs += zip(one, two, strict=True)
        elif sort == "map":
            if one.keys() != two.keys():
                return False
            pairs += [(one[key], two[key]) for key in one]
        elif one != two:
            return False
    return True


def unequal(run: Evaluation, left: Any, right: Any) -> bool:
    return not equal(run, left, right)


def ordering(sign: str, test: Callable[[Any, Any], bool]) -> Callable[[Evaluation, Any, Any], bool]:
    def apply(run: Evaluation, left: Any, right: Any) -> bool:
        sort, other = kind(left), kind(right)
        if not (sort == other in ORDERED or {sort, other} <= NUMBERS):
            misfit(sign, left, right)
        if sort == "string":
            run.spend(min(len(left), len(right)) // CHARACTERS_PER_STEP)
        return test(left, right)

    return apply


def within(run: Evaluation, item: Any, holder: Any) -> bool:
    sort = kind(holder)
    if sort == "map":
        return kind(item) == "string" and item in holder
    if sort != "list":
        misfit("in", item, holder)
    return any(equal(run, item, element) for element in holder)


def select(_: Evaluation, holder: Any, field: str) -> Any:
    if kind(holder) != "map":
        raise EvaluationError(f"{kind(holder)} has no field {shown(field)}")
    if field not in holder:
        raise EvaluationError(f"there is no field {shown(field)}")
    return holder[field]


def index(run: Evaluation, holder: Any, key: Any) -> Any:
    """The element of a list, or the entry of a map."""
    sort, by = kind(holder), kind(key)
    if sort == "map" and by == "string":
        return select(run, holder, key)
    if sort != "list" or by not in NUMBERS or key != key // 1:
        misfit("[]", holder, key)
    if not 0 <= key < len(holder):
        raise EvaluationError(f"there is no element {int(key)} in a list of {len(holder):,}")
    return holder[int(key)]


def texts(what: str, *values: Any) -> None:
    if any(kind(value) != "string" for value in values):
        misfit(what, *values)


def contains(run: Evaluation, text: Any, part: Any) -> bool:
    """Python's search is linear but for short parts or texts, where it may try every place."""
    texts("contains", text, part)
    tried = min(len(part), 100 if len(text) < 30_000 else 6)
    run.spend(len(text) * tried // SEARCH_PER_STEP)
    run.spend((len(text) + len(part)) // CHARACTERS_PER_STEP)
    return part in text


def starts_with(run: Evaluation, text: Any, part: Any) -> bool:
    texts("startsWith", text, part)
    run.spend(len(part) // CHARACTERS_PER_STEP)
    return bool(text.startswith(part))


def ends_with(run: Evaluation, text: Any, part: Any) -> bool:
    texts("endsWith", text, part)
    run.spend(len(part) // CHARACTERS_PER_STEP)
    return bool(text.endswith(part))


def size(_: Evaluation, value: Any) -> int:
    if kind(value) not in {"string", "list", "map"}:
        misfit("size", value)
    return len(value)


def to_int(_: Evaluation, value: Any) -> int:
    sort = kind(value)
    if sort == "int":
        return in_range(value)
    if sort == "double" and abs(value) < 2**63:
        return int(value)
    if sort == "string" and re.fullmatch(r"-?[0-9]{1,19}", value):
        return in_range(int(value))
    raise EvaluationError(f"{shown(value) if sort == 'string' else sort} is no int")


def to_double(_: Evaluation, value: Any) -> float:
    sort = kind(value)
    if sort in NUMBERS:
        return float(value)
    if sort == "string" and re.fullmatch(r"-?[0-9]{1,99}(\.[0-9]{1,99})?(e-?[0-9]{1,3})?", value):
        return float(value)
    raise EvaluationError(f"{shown(value) if sort == 'string' else sort} is no double")


def to_string(_: Evaluation, value: Any) -> str:
    sort = kind(value)
    if sort == "bool":
        return "true" if value else "false"
    if sort not in {"string", "int"}:
        misfit("string", value)
    return str(value)


UNARY: dict[str, Callable[[Evaluation, Any], Any]] = {"!": refuse, "-": negate}
BINARY: dict[str, Callable[[Evaluation, Any, Any], Any]] = {
    "==": equal,
    "!=": unequal,
    "<": ordering("<", operator.lt),
    "<=": ordering("<=", operator.le),
    ">": ordering(">", operator.gt),
    ">=": ordering(">=", operator.ge),
    "in": within,
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


def operation(function: Callable[..., Any], place: int, *operands: Step) -> Step:
    """The function of what all operands give; an error of its own is an error at the place."""

    def step(run: Evaluation) -> Any:
        run.spend(1)
        values = [operand(run) for operand in operands]
        try:
            return function(run, *values)
        except EvaluationError as fault:
            fault.place = place
            raise

    return step


def constant(value: Any) -> Step:
    return lambda _: value


def variable(slot: int) -> Step:
    return lambda run: run.slots[slot]


def field_of(place: int, holder: Step, field: str) -> Step:
    return operation(select, place, holder, constant(field))


def has_field(place: int, holder: Step, field: str) -> Step:
    """Whether the map has the field; what has no fields at all is an error."""

    def test(_: Evaluation, value: Any) -> bool:
        if kind(value) != "map":
            raise EvaluationError(f"{kind(value)} has no field {shown(field)}")
        return field in value

    return operation(test, place, holder)


def listing(elements: list[Step]) -> Step:
    def step(run: Evaluation) -> list[Any]:
        run.spend(1 + len(elements))
        return [element(run) for element in elements]

    return step


def mapping(place: int, entries: list[tuple[Step, Step]]) -> Step:
    """A map, whose keys are different strings."""

    def step(run: Evaluation) -> dict[str, Any]:
        run.spend(1 + len(entries))
        made: dict[str, Any] = {}
        for key, value in entries:
            name = key(run)
            if kind(name) != "string":
                raise EvaluationError(f"a key of a map is {kind(name)}, not string", place)
            if name in made:
                raise EvaluationError(f"the key {shown(name)} stands twice in a map", place)
            made[name] = value(run)
        return made

    return step


def choice(place: int, condition: Step, yes: Step, no: Step) -> Step:
    def step(run: Evaluation) -> Any:
        run.spend(1)
        return (yes if truth(condition(run), 'the left side of "?"', place) else no)(run)

    return step


def settle(run: Evaluation, place: int, steps: Iterable[Step], end: bool) -> bool:
    """`end` as soon as a step gives it, whatever errors the others made; else the first error."""
    first: EvaluationError | None = None
    for step in steps:
        try:
            if truth(step(run), "a condition", place) is end:
                return end
        except EvaluationError as fault:
            run.spend(FAULT_STEPS)
            first = first or fault
    if first is not None:
        raise first
    return not end


def junction(place: int, operands: list[Step], end: bool) -> Step:
    """`||` of the operands if they may end at true, `&&` if at false."""

    def step(run: Evaluation) -> bool:
        run.spend(1)
        return settle(run, place, operands, end)

    return step


class Macro:
    """A loop over the elements of a list or the keys of a map, each in the slot in turn."""

    def __init__(self, place: int, holder: Step, slot: int, bodies: list[Step]) -> None:
        self.place, self.holder, self.slot, self.bodies = place, holder, slot, bodies

    def each(self, run: Evaluation) -> Iterator[Any]:
        holder = self.holder(run)
        if kind(holder) not in {"list", "map"}:
            raise EvaluationError(f"{kind(holder)} has no elements", self.place)
        for element in holder:
            run.spend(2)
            run.slots[self.slot] = element
            yield element

    def test(self, run: Evaluation) -> bool:
        return truth(self.bodies[0](run), "a condition", self.place)

    def all(self, run: Evaluation) -> bool:
        return settle(run, self.place, (self.bodies[0] for _ in self.each(run)), end=False)

    def exists(self, run: Evaluation) -> bool:
        return settle(run, self.place, (self.bodies[0] for _ in self.each(run)), end=True)

    def exists_one(self, run: Evaluation) -> bool:
        return sum(self.test(run) for _ in self.each(run)) == 1

    def filter(self, run: Evaluation) -> list[Any]:
        return [element for element in self.each(run) if self.test(run)]

    def map(self, run: Evaluation) -> list[Any]:
        if len(self.bodies) == 1:
            return [self.bodies[0](run) for _ in self.each(run)]
        return [self.bodies[1](run) for _ in self.each(run) if self.test(run)]


# Name, and how many arguments may follow the variable.
MACROS: dict[str, tuple[set[int], Callable[[Macro, Evaluation], Any]]] = {
    "all": ({1}, Macro.all),
    "exists": ({1}, Macro.exists),
    "exists_one": ({1}, Macro.exists_one),
    "filter": ({1}, Macro.filter),
    "map": ({1, 2}, Macro.map),
}


def matcher(pattern: str) -> Callable[[Evaluation, Any], bool]:
    """Whether the pattern is found in a text; `ValueError` when it is none.

    RE2 needs time for the text times the pattern at worst, and no more memory than it is given.
    """
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415  few expressions need it

    options = re2.Options()
    options.max_mem = PATTERN_MEMORY
    options.log_errors = False
    options.never_capture = True
    try:
        found = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(text) from None
    instructions: int = found.programsize

    def matches(run: Evaluation, text: Any) -> bool:
        texts("matches", text)
        longest = len(text) if text.isascii() else 4 * len(text)
        run.spend(longest * instructions // PATTERN_PER_STEP)
        try:
            return found.search(text.encode()) is not None
        except UnicodeEncodeError:
            raise EvaluationError("the text for matches holds a lone surrogate") from None

    return matches
