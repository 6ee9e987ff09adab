"""Compiles untrusted conditions in CEL, which are evaluated over JSON in a bounded number of steps.

The parser reads the text once and turns every part into the step that evaluates it. It checks names
and nesting on the way. `operators.py` implements the steps; docs/expressions.md describes the
language and its limits.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from tenuto.model.bounds import is_storable, make_storable
from tenuto.model.errors import Invalid
from tenuto.model.flows.expressions import operators
from tenuto.model.flows.expressions.operators import Evaluation, EvaluationError, Step
from tenuto.model.flows.expressions.patterns import compile_pattern

MAX_EXPRESSION = 4_096
MAX_NESTING = 32
MAX_PATTERNS = 16

KEYWORDS = {"true": True, "false": False, "null": None}
RESERVED = frozenset(
    "as break const continue else false for function if import in let loop package namespace null"
    " return true var void while".split()
)
# The precedence of operators, loosest first.
LEVELS = {
    sign: level
    for level, signs in enumerate(["||", "&&", "== != < <= > >= in", "+ -", "* / %"])
    for sign in signs.split()
}
TOKEN = re.compile(
    r"""
    (?P<blank> [ \t\r\n\f]+ | //[^\n]* )
  | (?P<unsupported> (?: [bB][rR]? | [rR][bB] ) ["'] | (?: 0[xX][0-9a-fA-F]+ | [0-9]+ ) [uU] )
  | (?P<raw> [rR] (?: \"{3} .*? \"{3} | '{3} .*? '{3} | "[^"\r\n]*" | '[^'\r\n]*' ) )
  | (?P<string>
        \"{3} (?: [^\\] | \\. )*? \"{3} | '{3} (?: [^\\] | \\. )*? '{3}
      | " (?: [^"\\\r\n] | \\. )* " | ' (?: [^'\\\r\n] | \\. )* ' )
  | (?P<double> [0-9]* \.[0-9]+ (?: [eE][+-]?[0-9]+ )? | [0-9]+ [eE][+-]?[0-9]+ )
  | (?P<int> 0[xX][0-9a-fA-F]+ | [0-9]+ )
  | (?P<name> [A-Za-z_][A-Za-z0-9_]* )
  | (?P<symbol> && | \|\| | [=!<>]= | [-+*/%!<>?:.,()\[\]{}] )
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
    """One token of the text; the last token has the kind "end"."""

    kind: str
    text: str
    position: int


class ParsedPart(NamedTuple):
    """A parsed part: the step that evaluates it, its nesting depth, and what macros need.

    `literal` is the text of a string literal, for `matches`. `field` is a field access, for `has`.
    """

    step: Step
    depth: int = 1
    literal: str | None = None
    field: tuple[Step, str] | None = None


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled condition, without state between two calls of `holds`."""

    text: str
    names: tuple[str, ...]
    used: frozenset[str]
    slots: int
    step: Step

    def holds(self, variables: Mapping[str, Any]) -> bool:
        """True if the condition holds; raises `Invalid` if it fails or a variable is missing."""
        for name in sorted(self.used - variables.keys()):
            raise Invalid(f'the variable "{name}" is missing', "expression_failed")
        values = [variables.get(name) for name in self.names]
        evaluation = Evaluation(values + [None] * (self.slots - len(values)))
        try:
            return operators.require_bool(self.step(evaluation), "the expression")
        except EvaluationError as failure:
            raise expression_error(
                str(failure), "expression_failed", self.text, failure.position
            ) from None


def compile_expression(text: str, names: frozenset[str]) -> Expression:
    """Returns the compiled expression; `Invalid` for wrong syntax or variables not in `names`."""
    if not text.strip():
        raise Invalid("the expression is empty", "expression_invalid")
    if len(text) > MAX_EXPRESSION:
        length = f"{len(text):,} characters long; at most {MAX_EXPRESSION:,} are allowed"
        raise Invalid(f"the expression is {length}", "expression_invalid")
    if not is_storable(text):
        raise Invalid("the expression holds a NUL or a lone surrogate", "expression_invalid")
    parser = Parser(text, sorted(names))
    root = parser.parse_all()
    used = frozenset(parser.used)
    return Expression(text, tuple(sorted(names)), used, parser.slots, root.step)


def expression_error(message: str, code: str, text: str, position: int | None) -> Invalid:
    """Returns an `Invalid` with line and column of `position`, from 1; without both for `None`."""
    message = make_storable(message, 300)
    if position is None:
        return Invalid(message, code)
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return Invalid(f"{message} (line {line}, column {column})", code, line=line, column=column)


def raise_invalid(message: str, text: str, position: int) -> NoReturn:
    """Raises `Invalid` with the message and the position in the text."""
    raise expression_error(message, "expression_invalid", text, position)


def tokenize(text: str) -> list[Token]:
    """Returns the tokens without blanks, then an `end` token; `Invalid` for unknown characters."""
    result: list[Token] = []
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            is_open_string = text[position] in "\"'"
            raise_invalid(
                "a string does not end" if is_open_string else "unexpected character",
                text,
                position,
            )
        kind = match.lastgroup
        assert kind is not None
        if kind == "unsupported":
            raise_invalid("bytes and unsigned integers are not supported", text, position)
        if kind != "blank":
            result.append(Token(kind, match[0], position))
        position = match.end()
    return [*result, Token("end", "", len(text))]


def unescape(token: Token, text: str) -> str:
    """Returns the value of a string literal; raises `Invalid` for an invalid escape."""
    is_raw = token.kind == "raw"
    quoted = token.text[1:] if is_raw else token.text
    quote_length = 3 if quoted[:3] in {'"""', "'''"} else 1
    inner = quoted[quote_length:-quote_length]

    def replace_escape(match: re.Match[str]) -> str:
        kind = match.lastgroup
        assert kind is not None
        if kind == "plain":
            return PLAIN.get(match[kind], match[kind])
        if kind == "wrong":
            raise_invalid("a string has an unknown escape", text, token.position)
        code = int(match[kind], 8 if kind == "octal" else 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise_invalid("a string has an escape that is no character", text, token.position)
        return chr(code)

    return inner if is_raw else ESCAPE.sub(replace_escape, inner)


class Parser:
    """Recursive-descent parser of one text, from the loosest operators to the tightest."""

    def __init__(self, text: str, names: list[str]) -> None:
        self.text = text
        self.tokens = tokenize(text)
        self.position = 0
        self.nesting = 0
        self.pattern_count = 0
        self.name_count = len(names)
        self.scope = list(names)
        self.slots = len(names)
        self.used: set[str] = set()

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.position]

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        """Raises `Invalid` at the position, or else at the next token."""
        raise_invalid(message, self.text, self.token.position if position is None else position)

    def fail_unexpected(self) -> NoReturn:
        """Raises `Invalid`: the next token is not allowed here."""
        if self.token.kind == "end":
            self.fail("the expression ends too early")
        self.fail(f"unexpected {operators.quote(self.token.text)}")

    def advance(self) -> Token:
        """Consumes and returns the next token."""
        token = self.token
        self.position += 1
        return token

    def accept(self, symbol: str) -> bool:
        """Consumes the next token if it is this symbol; returns whether it was."""
        is_next = self.token.kind == "symbol" and self.token.text == symbol
        self.position += is_next
        return is_next

    def expect(self, symbol: str) -> None:
        """Consumes the next token; raises `Invalid` unless it is this symbol."""
        if not self.accept(symbol):
            self.fail_unexpected()

    def expect_name(self) -> str:
        """Consumes and returns a name; raises `Invalid` if the next token is no name."""
        if self.token.kind != "name" or self.token.text in {"in", *KEYWORDS}:
            self.fail_unexpected()
        return self.advance().text

    def fail_too_deep(self, position: int | None = None) -> NoReturn:
        """Raises `Invalid`: the expression is nested too deeply."""
        self.fail(f"the expression is nested deeper than {MAX_NESTING}", position)

    def build_part(self, position: int, step: Step, *parts: ParsedPart) -> ParsedPart:
        """Returns a part one level deeper than its parts; raises `Invalid` beyond the limit."""
        depth = 1 + max((part.depth for part in parts), default=0)
        if depth > MAX_NESTING:
            self.fail_too_deep(position)
        return ParsedPart(step, depth)

    def build_operation(
        self, function: Callable[..., Any], position: int, *parts: ParsedPart
    ) -> ParsedPart:
        """Returns a part that applies the function to the values of its parts."""
        step = operators.operation(function, position, *[part.step for part in parts])
        return self.build_part(position, step, *parts)

    def parse_all(self) -> ParsedPart:
        """Parses the whole text as one expression."""
        part = self.parse_expression()
        if self.token.kind != "end":
            self.fail_unexpected()
        return part

    def parse_expression(self) -> ParsedPart:
        """Parses an expression, which may be `condition ? yes : no`."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.fail_too_deep()
        part = self.parse_binary(0)
        position = self.token.position
        if self.accept("?"):
            yes = self.parse_binary(0)
            self.expect(":")
            no = self.parse_expression()
            step = operators.conditional(position, part.step, yes.step, no.step)
            part = self.build_part(position, step, part, yes, no)
        self.nesting -= 1
        return part

    def parse_binary(self, min_level: int) -> ParsedPart:
        """Parses operators of at least this precedence level, left-associative."""
        left = self.parse_unary()
        while (
            self.token.kind in {"symbol", "name"}
            and (level := LEVELS.get(self.token.text, -1)) >= min_level
        ):
            position, sign = self.token.position, self.advance().text
            if sign in {"||", "&&"}:
                left = self.parse_logical(position, sign, left)
            else:
                right = self.parse_binary(level + 1)
                left = self.build_operation(operators.BINARY[sign], position, left, right)
        return left

    def parse_logical(self, position: int, sign: str, first: ParsedPart) -> ParsedPart:
        """Parses all operands joined by the same `&&` or `||` into one part."""
        parts = [first, self.parse_binary(LEVELS[sign] + 1)]
        while self.accept(sign):
            parts.append(self.parse_binary(LEVELS[sign] + 1))
        step = operators.logical(position, [part.step for part in parts], stop_value=sign == "||")
        return self.build_part(position, step, *parts)

    def parse_unary(self) -> ParsedPart:
        """Parses a member with any number of `!` and `-` before it."""
        signs: list[Token] = []
        while self.token.kind == "symbol" and self.token.text in {"!", "-"}:
            if self.token.text == "-" and self.tokens[self.position + 1].kind in {"int", "double"}:
                break
            signs.append(self.advance())
        part = self.parse_member()
        for sign in reversed(signs):
            part = self.build_operation(operators.UNARY[sign.text], sign.position, part)
        return part

    def parse_member(self) -> ParsedPart:
        """Parses a primary with any number of `.field`, `.method()` and `[key]` after it."""
        part = self.parse_primary()
        while True:
            position = self.token.position
            if self.accept("."):
                part = self.parse_dotted(position, part)
            elif self.accept("["):
                key = self.parse_expression()
                self.expect("]")
                part = self.build_operation(operators.index, position, part, key)
            else:
                return part

    def parse_dotted(self, position: int, container: ParsedPart) -> ParsedPart:
        """Parses what follows a dot: a field, a macro or a method."""
        name = self.expect_name()
        if not self.accept("("):
            step = operators.field_of(position, container.step, name)
            part = self.build_part(position, step, container)
            return part._replace(field=(container.step, name))
        if name in operators.MACROS:
            return self.parse_macro(position, container, name)
        parts = self.parse_parts(")")
        if name == "matches":
            return self.build_matches(position, [container, *parts])
        if name not in operators.METHODS:
            self.fail(f"there is no method {operators.quote(name)}", position)
        count, function = operators.METHODS[name]
        if len(parts) != count:
            self.fail(f'"{name}" takes {count} arguments, not {len(parts)}', position)
        return self.build_operation(function, position, container, *parts)

    def parse_macro(self, position: int, container: ParsedPart, name: str) -> ParsedPart:
        """Parses a macro's arguments: a variable, which hides others of its name, and bodies."""
        variable = self.expect_name()
        if variable in RESERVED:
            self.fail(f"{operators.quote(variable)} is a reserved word", position)
        self.expect(",")
        slot = len(self.scope)
        self.scope.append(variable)
        self.slots = max(self.slots, len(self.scope))
        bodies = self.parse_parts(")")
        self.scope.pop()
        counts, function = operators.MACROS[name]
        if len(bodies) not in counts:
            self.fail(f'"{name}" takes a variable and an expression', position)
        loop = operators.Macro(position, container.step, slot, [body.step for body in bodies])
        return self.build_part(
            position, lambda evaluation: function(loop, evaluation), container, *bodies
        )

    def build_matches(self, position: int, parts: list[ParsedPart]) -> ParsedPart:
        """Returns a part for `matches`; compiles its pattern, which must be a string literal."""
        if len(parts) != 2 or parts[1].literal is None:
            self.fail('"matches" takes one pattern, which must be a string literal', position)
        self.pattern_count += 1
        if self.pattern_count > MAX_PATTERNS:
            self.fail(f"there are more than {MAX_PATTERNS} patterns", position)
        try:
            function = compile_pattern(parts[1].literal)
        except ValueError as reason:
            self.fail(f"the pattern cannot be used: {reason}", position)
        return self.build_operation(function, position, parts[0])

    def parse_parts(self, end: str) -> list[ParsedPart]:
        """Parses expressions and commas up to the symbol `end`; `]` allows a trailing comma."""
        parts: list[ParsedPart] = []
        while not self.accept(end):
            parts.append(self.parse_expression())
            if not self.accept(","):
                self.expect(end)
                break
            if end == ")" and self.token.text == end:
                self.fail_unexpected()
        return parts

    def parse_primary(self) -> ParsedPart:
        """Parses a literal, a name, a call, a list, a map, or an expression in parentheses."""
        token = self.token
        if token.kind in {"string", "raw"}:
            literal = unescape(self.advance(), self.text)
            return ParsedPart(operators.constant(literal), literal=literal)
        if token.kind in {"int", "double"} or token.text == "-":
            return ParsedPart(operators.constant(self.parse_number()))
        if token.kind == "name":
            return self.parse_name()
        if self.accept("("):
            part = self.parse_expression()
            self.expect(")")
            return part
        if self.accept("["):
            parts = self.parse_parts("]")
            return self.build_part(
                token.position, operators.list_of([p.step for p in parts]), *parts
            )
        if not self.accept("{"):
            self.fail_unexpected()
        return self.parse_map(token.position)

    def parse_number(self) -> int | float:
        """Parses a number with its sign; the smallest integer is valid only with its sign."""
        negative = self.accept("-")
        token = self.advance()
        if token.kind == "double":
            real = float(token.text)
            if math.isinf(real):
                self.fail("a number is too large", token.position)
            return -real if negative else real
        base = 16 if token.text[:2] in {"0x", "0X"} else 10
        whole = int(token.text, base) * (-1 if negative else 1)
        if not operators.MIN_INT <= whole <= operators.MAX_INT:
            self.fail("an integer is beyond 64 bits", token.position)
        return whole

    def parse_map(self, position: int) -> ParsedPart:
        """Parses the entries of a map after its `{`, and its `}`."""
        entries: list[tuple[ParsedPart, ParsedPart]] = []
        while not self.accept("}"):
            key = self.parse_expression()
            self.expect(":")
            entries.append((key, self.parse_expression()))
            if not self.accept(","):
                self.expect("}")
                break
        step = operators.map_of(position, [(key.step, value.step) for key, value in entries])
        return self.build_part(position, step, *[part for entry in entries for part in entry])

    def parse_name(self) -> ParsedPart:
        """Parses a name that begins an operand: a constant, a function call or a variable."""
        token = self.advance()
        if token.text in KEYWORDS:
            return ParsedPart(operators.constant(KEYWORDS[token.text]))
        if self.accept("("):
            return self.build_call(token.position, token.text, self.parse_parts(")"))
        if token.text not in self.scope:
            variables = ", ".join(sorted(set(self.scope))) or "none"
            message = f"there is no variable {operators.quote(token.text)}; there are: {variables}"
            self.fail(message, token.position)
        slot = len(self.scope) - 1 - self.scope[::-1].index(token.text)
        if slot < self.name_count:
            self.used.add(token.text)
        return ParsedPart(operators.variable(slot))

    def build_call(self, position: int, name: str, parts: list[ParsedPart]) -> ParsedPart:
        """Returns a part for a call of a function, `matches` or `has`."""
        if name == "matches":
            return self.build_matches(position, parts)
        if name != "has" and name not in operators.FUNCTIONS:
            self.fail(f"there is no function {operators.quote(name)}", position)
        if len(parts) != 1:
            self.fail(f'"{name}" takes 1 argument, not {len(parts)}', position)
        if name != "has":
            return self.build_operation(operators.FUNCTIONS[name], position, *parts)
        if parts[0].field is None:
            self.fail('"has" takes a field, as in has(result.score)', position)
        return self.build_part(position, operators.has_field(position, *parts[0].field), *parts)
