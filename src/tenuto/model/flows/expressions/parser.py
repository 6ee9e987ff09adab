"""Conditions in CEL: the text of a stranger becomes yes or no about JSON, in bounded steps.

The reader goes through the text once and makes of every part the step that evaluates it; names and
nesting are checked on the way. What steps do is in operations.py, the language and its
limits in docs/expressions.md.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from tenuto.model.bounds import clean, storable
from tenuto.model.errors import Invalid
from tenuto.model.flows.expressions import operators
from tenuto.model.flows.expressions.operators import Evaluation, EvaluationError, Step

MAX_EXPRESSION = 4_096
MAX_NESTING = 32
MAX_PATTERNS = 16

KEYWORDS = {"true": True, "false": False, "null": None}
RESERVED = frozenset(
    "as break const continue else false for function if import in let loop package namespace null"
    " return true var void while".split()
)
# How tightly operators bind, loosest first.
LEVELS = {
    sign: level
    for level, signs in enumerate(["||", "&&", "== != < <= > >= in", "+ -", "* / %"])
    for sign in signs.split()
}
TOKEN = re.compile(
    r"""
    (?P<blank> [ \t\r\n\f]+ | //[^\n]* )
  | (?P<foreign> (?: [bB][rR]? | [rR][bB] ) ["'] | (?: 0[xX][0-9a-fA-F]+ | [0-9]+ ) [uU] )
  | (?P<raw> [rR] (?: \"{3} .*? \"{3} | '{3} .*? '{3} | "[^"\r\n]*" | '[^'\r\n]*' ) )
  | (?P<string>
        \"{3} (?: [^\\] | \\. )*? \"{3} | '{3} (?: [^\\] | \\. )*? '{3}
      | " (?: [^"\\\r\n] | \\. )* " | ' (?: [^'\\\r\n] | \\. )* ' )
  | (?P<double> [0-9]* \.[0-9]+ (?: [eE][+-]?[0-9]+ )? | [0-9]+ [eE][+-]?[0-9]+ )
  | (?P<int> 0[xX][0-9a-fA-F]+ | [0-9]+ )
  | (?P<name> [A-Za-z_][A-Za-z0-9_]* )
  | (?P<mark> && | \|\| | [=!<>]= | [-+*/%!<>?:.,()\[\]{}] )
    """,
    re.X | re.S,
)
ESCAPE = re.compile(
    r"\\(?: (?P<plain> [abfnrtv\\?\"'`] ) | [xX](?P<byte> [0-9a-fA-F]{2} )"
    r" | u(?P<short> [0-9a-fA-F]{4} ) | U(?P<long> [0-9a-fA-F]{8} ) | (?P<octal> [0-3][0-7]{2} )"
    r" | (?P<wrong> . ) )",
    re.X | re.S,
)
PLAIN = dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))


class Token(NamedTuple):
    """A word of the text; the last one has the kind "end"."""

    kind: str
    text: str
    place: int


class ParsedPart(NamedTuple):
    """A part that was read: what evaluates it, its depth, and what `matches` and `has` look at."""

    step: Step
    depth: int = 1
    literal: str | None = None
    field: tuple[Step, str] | None = None


@dataclass(frozen=True, slots=True)
class Expression:
    """A condition that was understood. It keeps nothing between two calls."""

    text: str
    names: tuple[str, ...]
    used: frozenset[str]
    slots: int
    step: Step

    def holds(self, variables: Mapping[str, Any]) -> bool:
        """Whether it is true of the variables; `Invalid` when it has no answer."""
        for name in sorted(self.used - variables.keys()):
            raise Invalid(f'the variable "{name}" was not given', "expression_failed")
        values = [variables.get(name) for name in self.names]
        run = Evaluation(values + [None] * (self.slots - len(values)))
        try:
            return operators.truth(self.step(run), "the expression")
        except EvaluationError as fault:
            raise error(str(fault), "expression_failed", self.text, fault.place) from None


def compile_expression(text: str, names: frozenset[str]) -> Expression:
    """The expression, if it can be understood and uses no variables but these, else `Invalid`."""
    if not text.strip():
        raise Invalid("the expression is empty", "expression_invalid")
    if len(text) > MAX_EXPRESSION:
        length = f"{len(text):,} characters long; at most {MAX_EXPRESSION:,} are accepted"
        raise Invalid(f"the expression is {length}", "expression_invalid")
    if not storable(text):
        raise Invalid("the expression holds a NUL or a lone surrogate", "expression_invalid")
    reader = Parser(text, sorted(names))
    whole = reader.whole()
    used = frozenset(reader.used)
    return Expression(text, tuple(sorted(names)), used, reader.slots, whole.step)


def error(message: str, code: str, text: str, place: int | None) -> Invalid:
    """What is wrong, and the place of it as people count."""
    message = clean(message, 300)
    if place is None:
        return Invalid(message, code)
    line = text.count("\n", 0, place) + 1
    column = place - text.rfind("\n", 0, place)
    return Invalid(f"{message} (line {line}, column {column})", code, line=line, column=column)


def wrong(message: str, text: str, place: int) -> NoReturn:
    raise error(message, "expression_invalid", text, place)


def tokens(text: str) -> list[Token]:
    found: list[Token] = []
    place = 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            open_text = text[place] in "\"'"
            wrong("a string does not end" if open_text else "unexpected character", text, place)
        kind = match.lastgroup
        assert kind is not None
        if kind == "foreign":
            wrong("bytes and unsigned integers are not supported", text, place)
        if kind != "blank":
            found.append(Token(kind, match[0], place))
        place = match.end()
    return [*found, Token("end", "", len(text))]


def unescaped(token: Token, text: str) -> str:
    """What the string literal stands for."""
    raw = token.kind == "raw"
    quoted = token.text[1:] if raw else token.text
    marks = 3 if quoted[:3] in {'"""', "'''"} else 1
    inner = quoted[marks:-marks]

    def plain(match: re.Match[str]) -> str:
        kind = match.lastgroup
        assert kind is not None
        if kind == "plain":
            return PLAIN.get(match[kind], match[kind])
        if kind == "wrong":
            wrong("a string has an escape that does not exist", text, token.place)
        code = int(match[kind], 8 if kind == "octal" else 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            wrong("a string has an escape for no character", text, token.place)
        return chr(code)

    return inner if raw else ESCAPE.sub(plain, inner)


class Parser:
    """Reads one text, part by part, from the loosest binding to the tightest."""

    def __init__(self, text: str, names: list[str]) -> None:
        self.text = text
        self.tokens = tokens(text)
        self.at = 0
        self.nesting = 0
        self.patterns = 0
        self.names = len(names)
        self.scope = list(names)
        self.slots = len(names)
        self.used: set[str] = set()

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def wrong(self, message: str, place: int | None = None) -> NoReturn:
        wrong(message, self.text, self.token.place if place is None else place)

    def unexpected(self) -> NoReturn:
        if self.token.kind == "end":
            self.wrong("the expression ends too early")
        self.wrong(f"unexpected {operators.shown(self.token.text)}")

    def take(self) -> Token:
        token = self.token
        self.at += 1
        return token

    def takes(self, mark: str) -> bool:
        """Whether the mark comes next; if so, it is behind us."""
        found = self.token.kind == "mark" and self.token.text == mark
        self.at += found
        return found

    def demand(self, mark: str) -> None:
        if not self.takes(mark):
            self.unexpected()

    def name(self) -> str:
        if self.token.kind != "name" or self.token.text in {"in", *KEYWORDS}:
            self.unexpected()
        return self.take().text

    def too_deep(self, place: int | None = None) -> NoReturn:
        self.wrong(f"the expression is nested deeper than {MAX_NESTING}", place)

    def node(self, place: int, step: Step, *parts: ParsedPart) -> ParsedPart:
        depth = 1 + max((part.depth for part in parts), default=0)
        if depth > MAX_NESTING:
            self.too_deep(place)
        return ParsedPart(step, depth)

    def operation(self, function: Callable[..., Any], place: int, *parts: ParsedPart) -> ParsedPart:
        step = operators.operation(function, place, *[part.step for part in parts])
        return self.node(place, step, *parts)

    def whole(self) -> ParsedPart:
        found = self.expression()
        if self.token.kind != "end":
            self.unexpected()
        return found

    def expression(self) -> ParsedPart:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.too_deep()
        found = self.binary(0)
        place = self.token.place
        if self.takes("?"):
            yes = self.binary(0)
            self.demand(":")
            no = self.expression()
            step = operators.choice(place, found.step, yes.step, no.step)
            found = self.node(place, step, found, yes, no)
        self.nesting -= 1
        return found

    def binary(self, least: int) -> ParsedPart:
        """Operators that bind at least so tightly, the left one first."""
        left = self.unary()
        while (
            self.token.kind in {"mark", "name"}
            and (level := LEVELS.get(self.token.text, -1)) >= least
        ):
            place, sign = self.token.place, self.take().text
            if sign in {"||", "&&"}:
                left = self.junction(place, sign, left)
            else:
                right = self.binary(level + 1)
                left = self.operation(operators.BINARY[sign], place, left, right)
        return left

    def junction(self, place: int, sign: str, first: ParsedPart) -> ParsedPart:
        """All that is joined by the same sign is one part, however many there are."""
        parts = [first, self.binary(LEVELS[sign] + 1)]
        while self.takes(sign):
            parts.append(self.binary(LEVELS[sign] + 1))
        step = operators.junction(place, [part.step for part in parts], end=sign == "||")
        return self.node(place, step, *parts)

    def unary(self) -> ParsedPart:
        signs: list[Token] = []
        while self.token.kind == "mark" and self.token.text in {"!", "-"}:
            if self.token.text == "-" and self.tokens[self.at + 1].kind in {"int", "double"}:
                break
            signs.append(self.take())
        found = self.member()
        for sign in reversed(signs):
            found = self.operation(operators.UNARY[sign.text], sign.place, found)
        return found

    def member(self) -> ParsedPart:
        found = self.primary()
        while True:
            place = self.token.place
            if self.takes("."):
                found = self.dotted(place, found)
            elif self.takes("["):
                key = self.expression()
                self.demand("]")
                found = self.operation(operators.index, place, found, key)
            else:
                return found

    def dotted(self, place: int, holder: ParsedPart) -> ParsedPart:
        name = self.name()
        if not self.takes("("):
            step = operators.field_of(place, holder.step, name)
            found = self.node(place, step, holder)
            return found._replace(field=(holder.step, name))
        if name in operators.MACROS:
            return self.macro(place, holder, name)
        parts = self.parts(")")
        if name == "matches":
            return self.matches(place, [holder, *parts])
        if name not in operators.METHODS:
            self.wrong(f"there is no method {operators.shown(name)}", place)
        count, function = operators.METHODS[name]
        if len(parts) != count:
            self.wrong(f'"{name}" takes {count} arguments, not {len(parts)}', place)
        return self.operation(function, place, holder, *parts)

    def macro(self, place: int, holder: ParsedPart, name: str) -> ParsedPart:
        """A loop: its variable has a slot of its own, and hides others of the same name."""
        variable = self.name()
        if variable in RESERVED:
            self.wrong(f"{operators.shown(variable)} is a reserved word", place)
        self.demand(",")
        slot = len(self.scope)
        self.scope.append(variable)
        self.slots = max(self.slots, len(self.scope))
        bodies = self.parts(")")
        self.scope.pop()
        counts, run = operators.MACROS[name]
        if len(bodies) not in counts:
            self.wrong(f'"{name}" takes a variable and an expression', place)
        loop = operators.Macro(place, holder.step, slot, [body.step for body in bodies])
        return self.node(place, lambda on: run(loop, on), holder, *bodies)

    def matches(self, place: int, parts: list[ParsedPart]) -> ParsedPart:
        if len(parts) != 2 or parts[1].literal is None:
            self.wrong('"matches" takes one pattern, written out as a string', place)
        self.patterns += 1
        if self.patterns > MAX_PATTERNS:
            self.wrong(f"there are more than {MAX_PATTERNS} patterns", place)
        try:
            function = operators.matcher(parts[1].literal)
        except ValueError as reason:
            self.wrong(f"the pattern cannot be used: {reason}", place)
        return self.operation(function, place, parts[0])

    def parts(self, end: str) -> list[ParsedPart]:
        """Expressions with commas between them, up to the mark; a list may have one more comma."""
        found: list[ParsedPart] = []
        while not self.takes(end):
            found.append(self.expression())
            if not self.takes(","):
                self.demand(end)
                break
            if end == ")" and self.token.text == end:
                self.unexpected()
        return found

    def primary(self) -> ParsedPart:
        token = self.token
        if token.kind in {"string", "raw"}:
            literal = unescaped(self.take(), self.text)
            return ParsedPart(operators.constant(literal), literal=literal)
        if token.kind in {"int", "double"} or token.text == "-":
            return ParsedPart(operators.constant(self.number()))
        if token.kind == "name":
            return self.named()
        if self.takes("("):
            found = self.expression()
            self.demand(")")
            return found
        if self.takes("["):
            parts = self.parts("]")
            return self.node(token.place, operators.listing([p.step for p in parts]), *parts)
        if not self.takes("{"):
            self.unexpected()
        return self.map(token.place)

    def number(self) -> int | float:
        """A number with its sign, without which the least integer could not be written."""
        negative = self.takes("-")
        token = self.take()
        if token.kind == "double":
            real = float(token.text)
            if math.isinf(real):
                self.wrong("a number is too large", token.place)
            return -real if negative else real
        base = 16 if token.text[:2] in {"0x", "0X"} else 10
        whole = int(token.text, base) * (-1 if negative else 1)
        if not operators.LEAST_INT <= whole <= operators.MOST_INT:
            self.wrong("an integer is beyond 64 bits", token.place)
        return whole

    def map(self, place: int) -> ParsedPart:
        entries: list[tuple[ParsedPart, ParsedPart]] = []
        while not self.takes("}"):
            key = self.expression()
            self.demand(":")
            entries.append((key, self.expression()))
            if not self.takes(","):
                self.demand("}")
                break
        step = operators.mapping(place, [(key.step, value.step) for key, value in entries])
        return self.node(place, step, *[part for entry in entries for part in entry])

    def named(self) -> ParsedPart:
        """A word that stands alone or begins a chain: a constant, a function or a variable."""
        token = self.take()
        if token.text in KEYWORDS:
            return ParsedPart(operators.constant(KEYWORDS[token.text]))
        if self.takes("("):
            return self.call(token.place, token.text, self.parts(")"))
        if token.text not in self.scope:
            known = ", ".join(sorted(set(self.scope))) or "none"
            told = f"there is no variable {operators.shown(token.text)}; there are: {known}"
            self.wrong(told, token.place)
        slot = len(self.scope) - 1 - self.scope[::-1].index(token.text)
        if slot < self.names:
            self.used.add(token.text)
        return ParsedPart(operators.variable(slot))

    def call(self, place: int, name: str, parts: list[ParsedPart]) -> ParsedPart:
        if name == "matches":
            return self.matches(place, parts)
        if name != "has" and name not in operators.FUNCTIONS:
            self.wrong(f"there is no function {operators.shown(name)}", place)
        if len(parts) != 1:
            self.wrong(f'"{name}" takes 1 argument, not {len(parts)}', place)
        if name != "has":
            return self.operation(operators.FUNCTIONS[name], place, *parts)
        if parts[0].field is None:
            self.wrong('"has" takes a field, as in has(result.score)', place)
        return self.node(place, operators.has_field(place, *parts[0].field), *parts)
