"""How many bytes of large bodies this process holds at once: per token, per workspace, in all."""

from collections import Counter
from uuid import UUID

from tenuto.model.errors import TenutoError, TooMany, Unavailable
from tenuto.model.tenancy.access import Caller

FREE_BYTES = 64 * 1024
"""Bytes of each body that do not count: the number of connections bounds them."""
PER_TOKEN = 4
"""Bodies of the largest size that one token may have in progress."""
PER_WORKSPACE = 8
IN_ALL = 16
RETRY_S = 5.0
CODE = "too_many_bytes"


class BodyBudget:
    """Counts what bodies hold from their first bytes to the end of their requests."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._held: Counter[str | UUID] = Counter()
        self._all = 0

    def of(self, caller: Caller) -> "HeldBody":
        """The count of one body that the caller begins to send."""
        return HeldBody(self, caller)

    def take(self, caller: Caller, count: int) -> None:
        """Counts so many bytes more; raises, and counts nothing, beyond a bound."""
        per_token, per_workspace = PER_TOKEN * self._largest, PER_WORKSPACE * self._largest
        if self._held[caller.key] + count > per_token:
            raise self._too_many("the token", per_token)
        if self._held[caller.workspace] + count > per_workspace:
            raise self._too_many("the workspace", per_workspace)
        if self._all + count > IN_ALL * self._largest:
            raise Unavailable("the server holds as many bytes of bodies as it may", CODE)
        self._add(caller, count)

    def give_back(self, caller: Caller, count: int) -> None:
        """Counts so many bytes less."""
        self._add(caller, -count)

    def _add(self, caller: Caller, count: int) -> None:
        self._all += count
        for holder in (caller.key, caller.workspace):
            self._held[holder] += count
            if not self._held[holder]:
                del self._held[holder]

    def _too_many(self, who: str, most: int) -> TenutoError:
        return TooMany(
            f"{who} may have {most:,} bytes of bodies in progress; send fewer at once",
            CODE,
            retry_after=RETRY_S,
        )


class HeldBody:
    """What one body holds."""

    def __init__(self, budget: BodyBudget, caller: Caller) -> None:
        self._budget = budget
        self._caller = caller
        self._counted = 0

    def grow(self, size: int) -> None:
        """Counts the body as that large; raises if that is too much at once."""
        more = size - FREE_BYTES - self._counted
        if more > 0:
            self._budget.take(self._caller, more)
            self._counted += more

    def end(self) -> None:
        """Counts the body no more."""
        self._budget.give_back(self._caller, self._counted)
        self._counted = 0
