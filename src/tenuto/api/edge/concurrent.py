"""Limits how many live streams or waiting claims are open at once, per token and workspace."""

from collections import Counter
from collections.abc import Callable, Mapping
from uuid import UUID

from tenuto.model.errors import TooMany

Holder = str | UUID
"""A token's key or a workspace."""
RETRY_S = 5.0


class ConcurrencyLimiter:
    """Counts what tokens and workspaces have open in this process.

    `noun` names the counted things in errors, for example "live streams"; `code` is the error code.
    """

    def __init__(self, noun: str, code: str) -> None:
        self._noun = noun
        self._code = code
        self._counts: Counter[Holder] = Counter()

    def count(self, holder: Holder) -> int:
        """Returns how many the holder has open."""
        return self._counts[holder]

    def acquire(self, limits: Mapping[Holder, int]) -> Callable[[], None]:
        """Counts one more for each holder or raises `TooMany`; returns the function that undoes it.

        `limits` has the maximum of each holder. If one holder has reached it, nothing is counted.
        Only the first call of the returned function has an effect.
        """
        for holder, max_open in limits.items():
            if self._counts[holder] >= max_open:
                kind = "workspace" if isinstance(holder, UUID) else "token"
                raise TooMany(
                    f"the {kind} has reached its limit of {max_open:,} {self._noun}; close some",
                    self._code,
                    retry_after=RETRY_S,
                )
        self._counts.update(limits.keys())
        is_released = False

        def release() -> None:
            """Counts one fewer; does nothing on a second call."""
            nonlocal is_released
            if is_released:
                return
            is_released = True
            for holder in limits:
                self._counts[holder] -= 1
                if not self._counts[holder]:
                    del self._counts[holder]

        return release
