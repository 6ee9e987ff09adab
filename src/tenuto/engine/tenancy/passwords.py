"""Passwords: which are allowed, and their hashes (argon2id)."""

import asyncio

from tenuto.model import bounds
from tenuto.model.errors import Invalid

PASSWORD_COST = (3, 65_536, 4)
"""Passes, KiB and lanes of argon2id (RFC 9106): the cost of one guess at a stolen hash."""
MIN_PASSWORD = 10
MAX_PASSWORD = 1000


class PasswordChecker:
    """Checks passwords; a check takes as long for a user who does not exist."""

    def __init__(self) -> None:
        self._decoy_hash = ""

    async def is_right(self, stored: str | None, password: str) -> bool:
        """True if the password has the hash `stored`; false for `None` (no user), as slowly."""
        if not self._decoy_hash:
            self._decoy_hash = await hash_password("x" * MIN_PASSWORD)
        return await asyncio.to_thread(_verify, stored or self._decoy_hash, password) and bool(
            stored
        )


async def hash_password(password: str) -> str:
    """Returns the password's argon2 hash; raises `Invalid` if the password is not allowed."""
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD or not bounds.is_storable(password):
        raise Invalid(
            f"the password must have {MIN_PASSWORD} to {MAX_PASSWORD} characters", field="password"
        )
    return await asyncio.to_thread(_hash, password)


def _hash(password: str) -> str:
    from argon2 import PasswordHasher  # noqa: PLC0415  slow to load, rarely needed

    return PasswordHasher(*PASSWORD_COST).hash(password)


def _verify(stored: str, password: str) -> bool:
    """True if the password has the stored argon2 hash."""
    from argon2 import PasswordHasher  # noqa: PLC0415
    from argon2.exceptions import InvalidHashError, VerificationError  # noqa: PLC0415

    try:
        return PasswordHasher().verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False
