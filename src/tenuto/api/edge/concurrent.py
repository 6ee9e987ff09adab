"""How much of a kind may be held at once: live streams, claims that wait."""

from collections import Counter
from collections.abc import Callable, Mapping
from uuid import UUID

from tenuto.model.errors import TooMany

Holder = str | UUID
"""A token's key or a workspace."""
RETRY_S = 5.0


class Concurrent:
    """Counts what tokens and workspaces hold at this moment, in this process."""

    def __init__(self, what: str, code: str) -> None:
        self._what = what
        self._code = code
        self._counts: Counter[Holder] = Counter()

    def held(self, holder: Holder) -> int:
        """How many the holder has now."""
        return self._counts[holder]

    def take(self, bounds: Mapping[Holder, int]) -> Callable[[], None]:
        """Counts one more for each holder and returns what gives it back, the first time called.

        Raises `TooMany`, and counts nothing, if one of them has as many as it may.
        """
        for holder, most in bounds.items():
            if self._counts[holder] >= most:
                kind = "workspace" if isinstance(holder, UUID) else "token"
                raise TooMany(
                    f"the {kind} has {most:,} {self._what} open, as many as it may; close some",
                    self._code,
                    retry_after=RETRY_S,
                )
        self._counts.update(bounds.keys())
        given_back = False

        def give_back() -> None:
            nonlocal given_back
            if given_back:
                return
            given_back = True
            for holder in bounds:
                self._counts[holder] -= 1
                if not self._counts[holder]:
                    del self._counts[holder]

        return give_back
