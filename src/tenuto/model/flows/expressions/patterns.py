"""The patterns of `matches`: regular expressions whose cost is limited."""

from collections.abc import Callable
from typing import Any

from tenuto.model.flows.expressions.operators import Evaluation, EvaluationError, require_strings

PATTERN_PER_STEP = 200
PATTERN_MEMORY = 256 * 1024


def compile_pattern(pattern: str) -> Callable[[Evaluation, Any], bool]:
    """Returns a function that tests if a text contains the pattern; `ValueError` if it is invalid.

    At worst, RE2 needs time proportional to the length of the text times the size of the pattern.
    Its memory is limited.
    """
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415  few expressions need it

    options = re2.Options()
    options.max_mem = PATTERN_MEMORY
    options.log_errors = False
    options.never_capture = True
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(text) from None
    instructions: int = compiled.programsize

    def matches(evaluation: Evaluation, message: Any) -> bool:
        """True if the pattern matches a part of the text; charges text size times instructions."""
        require_strings("matches", message)
        max_bytes = len(message) if message.isascii() else 4 * len(message)
        evaluation.charge(max_bytes * instructions // PATTERN_PER_STEP)
        try:
            return compiled.search(message.encode()) is not None
        except UnicodeEncodeError:
            raise EvaluationError("the text for matches has a lone surrogate") from None

    return matches
