"""Encryption keys, and encryption with them: AES-256-GCM, bound to where the value is stored.

A key ring comes from a setting or from a file that only its owner may read. The first key of a
ring is the current one and encrypts; the others only decrypt what they encrypted before. No key is
used directly: each purpose has a key derived from it.
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
_MAX_FILE_BYTES = 1 << 16
_MAX_KEYS = 100
_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")


class Encrypted(msgspec.Struct, frozen=True):
    """An encrypted value: the id of its key, and base64 of nonce and ciphertext."""

    key_id: str
    data: str


class KeyRing:
    """A ring of encryption keys. `reload` reads the ring again if a key id is unknown."""

    def __init__(self, keys: Keys, reload: Callable[[], Keys] | None = None) -> None:
        self._keys = _validate_keys(keys)
        self._reload = reload
        self._ciphers: dict[str, AESGCM] = {}

    @property
    def current(self) -> str:
        """The id of the key that encrypts."""
        return next(iter(self._keys))

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of all keys, the current one first."""
        return tuple(self._keys)

    def encrypt(
        self, plain: str, *, workspace: UUID, table: str, row: str, column: str
    ) -> Encrypted:
        """Encrypts the text for one row and column; it cannot be decrypted for any other."""
        key_id, nonce = self.current, os.urandom(_NONCE_BYTES)
        associated_data = _associated_data(workspace, table, row, column, key_id)
        ciphertext = self._cipher(key_id).encrypt(nonce, plain.encode(), associated_data)
        return Encrypted(key_id, b64encode(nonce + ciphertext).decode())

    def decrypt(
        self, encrypted: Encrypted, *, workspace: UUID, table: str, row: str, column: str
    ) -> str:
        """Returns the text; `Incompatible` if it was altered or moved, or its key is missing."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415  not for every command

        cipher = self._cipher(encrypted.key_id)
        associated_data = _associated_data(workspace, table, row, column, encrypted.key_id)
        try:
            data = b64decode(encrypted.data, validate=True)
            return cipher.decrypt(
                data[:_NONCE_BYTES], data[_NONCE_BYTES:], associated_data
            ).decode()
        except (InvalidTag, ValueError) as error:
            raise Incompatible(
                f"the encrypted value in {table}.{column} was altered or belongs to another row",
                "secret_unreadable",
            ) from error

    def derive(self, purpose: str) -> bytes:
        """Returns 32 bytes derived from the current key for a purpose; they reveal no other key."""
        return _derive_key(self._keys[self.current], purpose)

    def derive_all(self, purpose: str) -> Keys:
        """Returns the key derived for a purpose from each key, by key id, the current one first."""
        return {key_id: _derive_key(key, purpose) for key_id, key in self._keys.items()}

    def derive_from(self, key_id: str, purpose: str) -> bytes:
        """Returns the key derived from the given key; `Incompatible` if that is not in the ring."""
        return _derive_key(self._key(key_id), purpose)

    def _key(self, key_id: str) -> bytes:
        """Returns a key; reloads the ring if the id is unknown, then raises `Incompatible`."""
        if key_id not in self._keys and self._reload is not None:
            self._keys = _validate_keys(self._reload())
        if key_id not in self._keys:
            raise Incompatible(
                f"no encryption key {key_id[:40]!r}; add it to the setting keys",
                "secret_unreadable",
            )
        return self._keys[key_id]

    def _cipher(self, key_id: str) -> "AESGCM":
        """Returns a key's cached cipher; `Incompatible` if the reloaded ring lacks the key."""
        from cryptography.hazmat.primitives.ciphers.aead import (  # noqa: PLC0415  as above
            AESGCM,
        )

        if key_id not in self._ciphers:
            self._ciphers[key_id] = AESGCM(_derive_key(self._key(key_id), "seal"))
        return self._ciphers[key_id]


def load_ring(folder: Path, text: str | None) -> KeyRing:
    """Returns the ring in `text` (`id:base64,...`), else of the key file, created if missing."""
    if text:
        return KeyRing(_parse_keys(text.split(",")))
    if not (folder / FILE).exists():
        with _lock_key_file(folder):
            if not (folder / FILE).exists():
                _write_key_file(folder, _new_key({}))
    return KeyRing(_read_key_file(folder), lambda: _read_key_file(folder))


def add_key(folder: Path) -> KeyRing:
    """Adds a new current key to the folder's file and returns the ring, with the old keys."""
    with _lock_key_file(folder):
        existing = _read_key_file(folder) if (folder / FILE).exists() else {}
        _write_key_file(folder, _new_key(existing) | existing)
        return load_ring(folder, None)  # before another process adds a key


def _derive_key(key: bytes, purpose: str) -> bytes:
    """Derives the key for a purpose with HKDF."""
    from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415  as above
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    return HKDF(SHA256(), KEY_BYTES, salt=None, info=f"tenuto {purpose}".encode()).derive(key)


def _associated_data(workspace: UUID, table: str, row: str, column: str, key_id: str) -> bytes:
    """Returns the JSON that binds an encrypted value to its row and column; no two are equal."""
    return msgspec.json.encode([workspace, table, row, column, key_id])


def _new_key(existing: Keys) -> Keys:
    """Returns a random key under a new random id."""
    key_id = os.urandom(4).hex()
    return _new_key(existing) if key_id in existing else {key_id: os.urandom(KEY_BYTES)}


def _validate_keys(keys: Keys) -> Keys:
    """Returns the keys unchanged; raises `Invalid` if their number, an id or a key is invalid."""
    if not 0 < len(keys) <= _MAX_KEYS:
        raise _invalid_keys_error(f"a key ring has 1 to {_MAX_KEYS} keys, not {len(keys)}")
    for number, (key_id, key) in enumerate(keys.items(), start=1):
        if not _KEY_ID.fullmatch(key_id):
            raise _invalid_keys_error(
                f"key {number}: an id has 1 to 32 letters, digits, '_' or '-'"
            )
        if len(key) != KEY_BYTES:
            raise _invalid_keys_error(f"key {number} has {len(key)} bytes instead of {KEY_BYTES}")
        if len(set(key)) == 1:
            raise _invalid_keys_error(f"key {number} repeats one byte and can be guessed")
    return keys


def _parse_keys(entries: Iterable[str]) -> Keys:
    """Parses entries `id:base64`, in order; raises `Invalid`, which quotes no part of a key."""
    keys: Keys = {}
    for number, entry in enumerate(entries, start=1):
        key_id, _, encoded = entry.strip().partition(":")
        if key_id in keys:
            raise _invalid_keys_error(f"key {number} has the same id as an earlier key")
        try:
            keys[key_id] = b64decode(encoded, validate=True)
        except ValueError:
            raise _invalid_keys_error(f"key {number} does not have the form id:base64") from None
    return keys


def _read_key_file(folder: Path) -> Keys:
    """Reads the key file; raises `Invalid` if it is unreadable or open to other users."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise _invalid_keys_error(f"{path} is open to other users; run: chmod 600 {path}")
            entries = msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=list[str])
    except OSError as error:
        raise _invalid_keys_error(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError:
        raise _invalid_keys_error(f"{path} is not a JSON list of id:base64") from None
    return _parse_keys(entries)


@contextmanager
def _lock_key_file(folder: Path) -> Iterator[None]:
    """Locks the key file for the block; an `OSError` in it becomes `Unavailable` or `Invalid`."""
    try:
        private.make_folder(folder)
        with open(folder / f"{FILE}.lock", "a", opener=private.opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        reason = f"cannot store keys in {folder}: {error.strerror}"
        raise (
            Unavailable(reason, "storage_full")
            if error.errno in _DISK_FULL_ERRNOS
            else _invalid_keys_error(reason)
        ) from error


def _write_key_file(folder: Path, keys: Keys) -> None:
    """Replaces the key file as a whole: a reader finds either the old ring or the new one."""
    new_file = folder / f"{FILE}.new"
    new_file.unlink(missing_ok=True)
    entries = [f"{key_id}:{b64encode(key).decode()}" for key_id, key in keys.items()]
    try:
        with open(new_file, "xb", opener=private.opener) as file:
            file.write(msgspec.json.encode(entries))
            file.flush()
            os.fsync(file.fileno())
        new_file.replace(folder / FILE)
    except OSError:
        new_file.unlink(missing_ok=True)
        raise
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _invalid_keys_error(reason: str) -> Invalid:
    """Returns the error for keys that are malformed or unsafe."""
    return Invalid(reason, "keys_invalid")
