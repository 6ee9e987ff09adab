"""Bounds the bytes of large bodies in this process: per token, per workspace and in total."""

from collections import Counter
from uuid import UUID

from tenuto.model.errors import TenutoError, TooMany, Unavailable
from tenuto.model.tenancy.access import Caller

UNCOUNTED_BYTES = 64 * 1024
"""Bytes of each body that are not counted: the limit of connections bounds them."""
MAX_PER_TOKEN = 4
"""How many bodies of maximum size one token may have in progress."""
MAX_PER_WORKSPACE = 8
MAX_TOTAL = 16
RETRY_S = 5.0
CODE = "too_many_bytes"


class BodyBudget:
    """Counts the bytes of bodies, from their first bytes to the end of their requests."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._used: Counter[str | UUID] = Counter()
        self._total = 0

    def new_reservation(self, caller: Caller) -> "BodyReservation":
        """Returns an empty reservation for one body that the caller starts to send."""
        return BodyReservation(self, caller)

    def reserve(self, caller: Caller, count: int) -> None:
        """Adds `count` bytes; raises `TooMany` or `Unavailable` and adds none above a bound."""
        per_token, per_workspace = (
            MAX_PER_TOKEN * self._max_body_bytes,
            MAX_PER_WORKSPACE * self._max_body_bytes,
        )
        if self._used[caller.key] + count > per_token:
            raise self._too_many_error("the token", per_token)
        if self._used[caller.workspace] + count > per_workspace:
            raise self._too_many_error("the workspace", per_workspace)
        if self._total + count > MAX_TOTAL * self._max_body_bytes:
            raise Unavailable(
                "the server has too many bytes of request bodies in progress; try again later", CODE
            )
        self._add(caller, count)

    def release(self, caller: Caller, count: int) -> None:
        """Subtracts `count` reserved bytes of the caller; nothing is checked."""
        self._add(caller, -count)

    def _add(self, caller: Caller, count: int) -> None:
        """Adds bytes to the counts of token, workspace and process; a negative count subtracts."""
        self._total += count
        for holder in (caller.key, caller.workspace):
            self._used[holder] += count
            if not self._used[holder]:
                del self._used[holder]

    def _too_many_error(self, subject: str, max_bytes: int) -> TenutoError:
        """Returns the error for a token or workspace with too many unfinished bodies."""
        return TooMany(
            f"{subject} may have {max_bytes:,} bytes of bodies in progress; send fewer at once",
            CODE,
            retry_after=RETRY_S,
        )


class BodyReservation:
    """The bytes that one body has reserved."""

    def __init__(self, budget: BodyBudget, caller: Caller) -> None:
        self._budget = budget
        self._caller = caller
        self._counted = 0

    def grow_to(self, size: int) -> None:
        """Reserves all but the first 64 KiB of `size` bytes; raises as `BodyBudget.reserve`."""
        more = size - UNCOUNTED_BYTES - self._counted
        if more > 0:
            self._budget.reserve(self._caller, more)
            self._counted += more

    def release(self) -> None:
        """Releases all reserved bytes of the body; a second call has no effect."""
        self._budget.release(self._caller, self._counted)
        self._counted = 0
