"""Stores a workspace's named secrets, and re-encrypts secrets with the current key."""

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from tenuto.encryption_keys import Encrypted
from tenuto.engine.core import Core
from tenuto.engine.tenancy.encryption import require_key_ring
from tenuto.engine.tenancy.secret_use import parse_use
from tenuto.engine.views import SecretView
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound, TenutoError
from tenuto.model.tenancy.access import Caller
from tenuto.model.tenancy.secret_use import Use, check_use, reference_error
from tenuto.model.tenancy.secrets import check_name, check_value
from tenuto.store.protocol import Row, Script, Statement

log = logging.getLogger("tenuto.engine")

MAX_BATCH = 500


class NamedSecrets:
    """The named secrets of one workspace, on behalf of one actor."""

    def __init__(
        self, core: Core, workspace: UUID, actor: str | None, caller: Caller | None = None
    ) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor
        self._caller = caller

    async def put(self, name: str, value: str | None = None, use: Use | None = None) -> None:
        """Stores a secret's value, usage rule, or both; `Forbidden` if a rule needs a higher role.

        The old and the new rule count. What is not given stays as it is. A rule alone for an
        unknown secret: `NotFound`. Tasks get the value at their next claim.
        """
        check_name(name)
        if value is None and use is None:
            raise Invalid("a value or a usage rule (use) is required", field="value")
        if use is not None:
            check_use(use)
            self._check_role(name, use)
        use_json = None if use is None else msgspec.json.encode(use).decode()
        encrypted = None if value is None else self._encrypt(name, value)

        def script() -> Script[None]:
            exists = yield from self._lock_changeable(name)
            if encrypted is not None:
                yield from self._store(name, encrypted, use_json)
            elif exists:
                yield Statement(
                    "secret_use_set", self._name_params(name) | {"use": use_json, "now": now}
                )
            else:
                raise _not_found(name)

        now = self._core.now()
        await self._core.store.transact(script)

    def _encrypt(self, name: str, value: str) -> Encrypted:
        check_value("value", value)
        return require_key_ring(self._core).encrypt(
            value, workspace=self._workspace, table="secret", row=name, column="data"
        )

    def _store(self, name: str, encrypted: Encrypted, use: str | None) -> Script[None]:
        """Stores the encrypted value and the rule (JSON); `Invalid` above the maximum number."""
        params = self._name_params(name) | {
            "id": self._core.clock.new_id(),
            "key_id": encrypted.key_id,
            "data": encrypted.data,
            "use": use,
            "actor": self._actor,
            "now": self._core.now(),
            "most": bounds.MAX_NAMED_SECRETS,
        }
        if not (yield Statement("secret_put", params)):
            raise Invalid(
                f"the workspace has {bounds.MAX_NAMED_SECRETS:,} secrets, the maximum;"
                " delete one first",
                "too_large",
            )

    async def list(self) -> Sequence[SecretView]:
        """Returns the secrets in the order of their names, without their values."""
        params = {"workspace": self._workspace, "most": bounds.MAX_NAMED_SECRETS}
        rows = await self._core.store.fetch(Statement("secrets", params))
        return [SecretView(**{**row, "use": parse_use(row["use"])}) for row in rows]

    async def delete(self, name: str) -> None:
        """Deletes a secret; tasks that name it fail to start. Raises `NotFound` or `Forbidden`."""
        check_name(name)

        def script() -> Script[None]:
            if not (yield from self._lock_changeable(name)):
                raise _not_found(name)
            yield Statement("secret_delete", self._name_params(name))

        await self._core.store.transact(script)

    def _name_params(self, name: str) -> dict[str, Any]:
        return {"workspace": self._workspace, "name": name}

    def _lock_changeable(self, name: str) -> Script[bool]:
        """Locks a secret; false if there is none, `Forbidden` if the caller cannot change it."""
        rows = yield Statement("secret_locked", self._name_params(name))
        for row in rows:
            self._check_role(name, parse_use(row["use"]))
        return bool(rows)

    def _check_role(self, name: str, use: Use) -> None:
        """Raises `Forbidden` if the rule requires a higher role than the caller's."""
        if (error := reference_error(name, use, self._caller)) is not None:
            raise error


def _not_found(name: str) -> NotFound:
    return NotFound(f"no secret {name!r}")


class KeyRotator:
    """Re-encrypts secrets with the current key, in every workspace that the core has access to."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def rotate_once(self, limit: int = MAX_BATCH) -> int:
        """Re-encrypts up to `limit` values of older keys with the current key; returns how many.

        A value that cannot be decrypted stays as it is.
        """
        bounds.check_number("limit", limit, 1, bounds.MAX_BULK)
        old_keys = list(require_key_ring(self._core).key_ids[1:])
        return (
            await self._core.store.transact(lambda: self._rotate(old_keys, limit))
            if old_keys
            else 0
        )

    def _rotate(self, old_keys: Sequence[str], limit: int) -> Script[int]:
        """Re-encrypts named secrets, then those of tasks, then of webhooks; returns how many."""
        params = {"keys": old_keys, "most": limit}
        rows = yield Statement("secrets_with_old_key", params)
        named = self._reencrypt(rows, "secret", "data")
        if named:
            yield Statement("secrets_reencrypt", rows={"fresh": named})
        rows = yield Statement("task_secrets_with_old_key", params | {"most": limit - len(named)})
        own = self._reencrypt(rows, "task_secret", "data")
        if own:
            yield Statement("task_secrets_reencrypt", rows={"fresh": own})
        remaining = limit - len(named) - len(own)
        rows = yield Statement("webhook_secrets_with_old_key", params | {"most": remaining})
        hooks = self._reencrypt(rows, "webhook", "secret")
        if hooks:
            yield Statement("webhook_secrets_reencrypt", rows={"fresh": hooks})
        return len(named) + len(own) + len(hooks)

    def _reencrypt(
        self, rows: Sequence[Row], table: str, column: str
    ) -> Sequence[tuple[UUID, str, str]]:
        """Returns rows (id, key id, data) with the current key; logs and omits invalid ones."""
        key_ring = require_key_ring(self._core)
        reencrypted = []
        for row in rows:
            location = {"table": table, "row": row["place"], "column": column}
            try:
                plain = key_ring.decrypt(
                    Encrypted(row["key_id"], row["data"]), workspace=row["workspace"], **location
                )
            except TenutoError as error:
                log.error(  # noqa: TRY400
                    "cannot decrypt %s %s; its old key stays: %s", table, row["id"], error
                )
                continue
            encrypted = key_ring.encrypt(plain, workspace=row["workspace"], **location)
            reencrypted.append((row["id"], encrypted.key_id, encrypted.data))
        return reencrypted
