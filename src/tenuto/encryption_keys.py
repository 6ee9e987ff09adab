"""Keys, and what is sealed with them: AES-256-GCM, bound to the place where it is stored.

A ring of keys comes from a setting or from a file that only its owner may read. The first key of a
ring is the current one and seals; the others only open what they sealed before. No key is used
itself: each purpose has a key derived from it.
"""

import errno
import fcntl
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from tenuto import private
from tenuto.model.errors import Incompatible, Invalid, Unavailable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Keys = dict[str, bytes]
"""Keys by their id, the current one first."""

KEY_BYTES = 32
FILE = "keys.json"
_NONCE_BYTES = 12
_MOST_BYTES = 1 << 16
_MOST_KEYS = 100
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")


class Encrypted(msgspec.Struct, frozen=True):
    """What only the ring can read: the id of the key, and base64 of nonce and ciphertext."""

    key_id: str
    data: str


class KeyRing:
    """A ring of keys. `read` answers the ring anew, for ids that were added meanwhile."""

    def __init__(self, keys: Keys, read: Callable[[], Keys] | None = None) -> None:
        self._keys = _checked(keys)
        self._read = read
        self._ciphers: dict[str, AESGCM] = {}

    @property
    def current(self) -> str:
        """The id of the key that seals."""
        return next(iter(self._keys))

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of all keys, the current one first."""
        return tuple(self._keys)

    def seal(self, plain: str, *, workspace: UUID, table: str, row: str, column: str) -> Encrypted:
        """The text sealed for one place; nowhere else can it be opened."""
        key_id, nonce = self.current, os.urandom(_NONCE_BYTES)
        place = _associated_data(workspace, table, row, column, key_id)
        sealed = self._cipher(key_id).encrypt(nonce, plain.encode(), place)
        return Encrypted(key_id, b64encode(nonce + sealed).decode())

    def open(self, sealed: Encrypted, *, workspace: UUID, table: str, row: str, column: str) -> str:
        """The text; `Incompatible` when it was altered or moved, or its key is not in the ring."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415  not for every command

        cipher = self._cipher(sealed.key_id)
        place = _associated_data(workspace, table, row, column, sealed.key_id)
        try:
            data = b64decode(sealed.data, validate=True)
            return cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], place).decode()
        except (InvalidTag, ValueError) as error:
            raise Incompatible(
                f"what {table}.{column} has sealed was altered or is from elsewhere",
                "secret_unreadable",
            ) from error

    def derive(self, purpose: str) -> bytes:
        """The current key's 32 bytes for a purpose; they tell nothing about any other."""
        return _derived(self._keys[self.current], purpose)

    def derive_all(self, purpose: str) -> Keys:
        """The same of every key, by its id, the current one first."""
        return {key_id: _derived(key, purpose) for key_id, key in self._keys.items()}

    def derive_from(self, key_id: str, purpose: str) -> bytes:
        """The same of one key; `Incompatible` when it is not in the ring."""
        return _derived(self._key(key_id), purpose)

    def _key(self, key_id: str) -> bytes:
        if key_id not in self._keys and self._read is not None:
            self._keys = _checked(self._read())
        if key_id not in self._keys:
            raise Incompatible(f"key {key_id[:40]!r} is not in the ring", "secret_unreadable")
        return self._keys[key_id]

    def _cipher(self, key_id: str) -> "AESGCM":
        from cryptography.hazmat.primitives.ciphers.aead import (  # noqa: PLC0415  as above
            AESGCM,
        )

        if key_id not in self._ciphers:
            self._ciphers[key_id] = AESGCM(_derived(self._key(key_id), "seal"))
        return self._ciphers[key_id]


def load_ring(folder: Path, text: str | None) -> KeyRing:
    """The ring that the text spells, or the one in the folder's file, which is made if missing."""
    if text:
        return KeyRing(_parsed(text.split(",")))
    if not (folder / FILE).exists():
        with _lock_key_file(folder):
            if not (folder / FILE).exists():
                _write(folder, _new_key({}))
    return KeyRing(_read(folder), lambda: _read(folder))


def add_key(folder: Path) -> KeyRing:
    """The folder's ring with a new current key; what the older ones sealed stays readable."""
    with _lock_key_file(folder):
        known = _read(folder) if (folder / FILE).exists() else {}
        _write(folder, _new_key(known) | known)
        return load_ring(folder, None)  # before anybody adds another


def _derived(key: bytes, purpose: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415  as above
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    return HKDF(SHA256(), KEY_BYTES, salt=None, info=f"tenuto {purpose}".encode()).derive(key)


def _associated_data(workspace: UUID, table: str, row: str, column: str, key_id: str) -> bytes:
    """A place's own spelling: JSON, so that no two places can share it."""
    return msgspec.json.encode([workspace, table, row, column, key_id])


def _new_key(known: Keys) -> Keys:
    key_id = os.urandom(4).hex()
    return _new_key(known) if key_id in known else {key_id: os.urandom(KEY_BYTES)}


def _checked(keys: Keys) -> Keys:
    if not 0 < len(keys) <= _MOST_KEYS:
        raise _refused(f"a ring has 1 to {_MOST_KEYS} keys, not {len(keys)}")
    for number, (key_id, key) in enumerate(keys.items(), start=1):
        if not _KEY_ID.fullmatch(key_id):
            raise _refused(f"key {number}: an id has 1 to 32 letters, digits, '_' or '-'")
        if len(key) != KEY_BYTES:
            raise _refused(f"key {number} has {len(key)} bytes instead of {KEY_BYTES}")
        if len(set(key)) == 1:
            raise _refused(f"key {number} repeats one byte and can be guessed")
    return keys


def _parsed(entries: Iterable[str]) -> Keys:
    """The keys in `id:base64` entries. No refusal repeats any part of a key."""
    keys: Keys = {}
    for number, entry in enumerate(entries, start=1):
        key_id, _, spelled = entry.strip().partition(":")
        if key_id in keys:
            raise _refused(f"key {number} has the id of an earlier one")
        try:
            keys[key_id] = b64decode(spelled, validate=True)
        except ValueError:
            raise _refused(f"key {number} is not spelled id:base64") from None
    return keys


def _read(folder: Path) -> Keys:
    path = folder / FILE
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise _refused(f"{path} is open to others: chmod 600 {path}")
            entries = msgspec.json.decode(file.read(_MOST_BYTES), type=list[str])
    except OSError as error:
        raise _refused(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError:
        raise _refused(f"{path} is not a JSON list of id:base64") from None
    return _parsed(entries)


@contextmanager
def _lock_key_file(folder: Path) -> Iterator[None]:
    """Nobody else changes the folder's keys meanwhile."""
    try:
        private.make_folder(folder)
        with open(folder / f"{FILE}.lock", "a", opener=private.opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        why = f"cannot keep keys in {folder}: {error.strerror}"
        raise Unavailable(why, "storage_full") if error.errno in _FULL else _refused(why) from error


def _write(folder: Path, keys: Keys) -> None:
    """Replace the file as a whole: a reader finds the old ring or the new one."""
    fresh = folder / f"{FILE}.new"
    fresh.unlink(missing_ok=True)
    entries = [f"{key_id}:{b64encode(key).decode()}" for key_id, key in keys.items()]
    try:
        with open(fresh, "xb", opener=private.opener) as file:
            file.write(msgspec.json.encode(entries))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / FILE)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _refused(why: str) -> Invalid:
    return Invalid(why, "keys_invalid")
