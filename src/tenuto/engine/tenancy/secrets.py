"""Secrets: a workspace's values by name, and the change from older keys to the current one."""

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from tenuto.encryption_keys import Encrypted
from tenuto.engine.core import Core
from tenuto.engine.tenancy.encryption import vault_of
from tenuto.engine.tenancy.secret_use import use_of
from tenuto.engine.views import SecretView
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound, TenutoError
from tenuto.model.tenancy.access import Caller
from tenuto.model.tenancy.secret_use import Use, check_use, naming_refusal
from tenuto.model.tenancy.secrets import check_name, check_value
from tenuto.store.protocol import Row, Script, Statement

log = logging.getLogger("tenuto.engine")

BATCH = 500


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
        """Keep a value under a name, and who may use it; tasks get it by their next claim.

        What is not given stays as it is. `Forbidden` if the rule is, or would be, for a higher role
        than the caller's.
        """
        check_name(name)
        if value is None and use is None:
            raise Invalid("give a value, or who may use the secret", field="value")
        if use is not None:
            check_use(use)
            self._check_role(name, use)
        text = None if use is None else msgspec.json.encode(use).decode()
        sealed = None if value is None else self._sealed(name, value)

        def script() -> Script[None]:
            there = yield from self._locked(name)
            if sealed is not None:
                yield from self._keep(name, sealed, text)
            elif there:
                yield Statement("secret_use", self._named(name) | {"use": text, "now": now})
            else:
                raise _missing(name)

        now = self._core.now()
        await self._core.store.transact(script)

    def _sealed(self, name: str, value: str) -> Encrypted:
        check_value("value", value)
        return vault_of(self._core).seal(
            value, workspace=self._workspace, table="secret", row=name, column="data"
        )

    def _keep(self, name: str, sealed: Encrypted, use: str | None) -> Script[None]:
        params = self._named(name) | {
            "id": self._core.clock.new_id(),
            "key_id": sealed.key_id,
            "data": sealed.data,
            "use": use,
            "actor": self._actor,
            "now": self._core.now(),
            "most": bounds.MAX_NAMED_SECRETS,
        }
        if not (yield Statement("secret_put", params)):
            raise Invalid(
                f"the workspace has {bounds.MAX_NAMED_SECRETS:,} secrets already", "too_large"
            )

    async def list(self) -> Sequence[SecretView]:
        """The secrets in order of their names, without their values."""
        params = {"workspace": self._workspace, "most": bounds.MAX_NAMED_SECRETS}
        rows = await self._core.store.fetch(Statement("secrets", params))
        return [SecretView(**{**row, "use": use_of(row["use"])}) for row in rows]

    async def delete(self, name: str) -> None:
        """Forget a secret; tasks that name it can no longer start."""
        check_name(name)

        def script() -> Script[None]:
            if not (yield from self._locked(name)):
                raise _missing(name)
            yield Statement("secret_delete", self._named(name))

        await self._core.store.transact(script)

    def _named(self, name: str) -> dict[str, Any]:
        return {"workspace": self._workspace, "name": name}

    def _locked(self, name: str) -> Script[bool]:
        """Hold a secret that the caller may change; answers whether there is one."""
        rows = yield Statement("secret_locked", self._named(name))
        for row in rows:
            self._check_role(name, use_of(row["use"]))
        return bool(rows)

    def _check_role(self, name: str, use: Use) -> None:
        if (error := naming_refusal(name, use, self._caller)) is not None:
            raise error


def _missing(name: str) -> NotFound:
    return NotFound(f"no secret {name!r}")


class KeyRotator:
    """The change of keys, for every workspace that the core sees."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def rotate_once(self, limit: int = BATCH) -> int:
        """Seal up to so many values of older keys with the current one; answers how many.

        What cannot be opened stays as it is.
        """
        bounds.number("limit", limit, 1, bounds.MAX_BULK)
        old = list(vault_of(self._core).key_ids[1:])
        return await self._core.store.transact(lambda: self._rotate(old, limit)) if old else 0

    def _rotate(self, old: Sequence[str], limit: int) -> Script[int]:
        params = {"keys": old, "most": limit}
        rows = yield Statement("secrets_stale", params)
        named = self._sealed_anew(rows, "secret", "data")
        if named:
            yield Statement("secrets_reseal", rows={"fresh": named})
        rows = yield Statement("task_secrets_stale", params | {"most": limit - len(named)})
        own = self._sealed_anew(rows, "task_secret", "data")
        if own:
            yield Statement("task_secrets_reseal", rows={"fresh": own})
        left = limit - len(named) - len(own)
        rows = yield Statement("webhook_secrets_stale", params | {"most": left})
        hooks = self._sealed_anew(rows, "webhook", "secret")
        if hooks:
            yield Statement("webhook_secrets_reseal", rows={"fresh": hooks})
        return len(named) + len(own) + len(hooks)

    def _sealed_anew(
        self, rows: Sequence[Row], table: str, column: str
    ) -> Sequence[tuple[UUID, str, str]]:
        """The rows with the current key; those that cannot be opened are left out."""
        vault = vault_of(self._core)
        fresh = []
        for row in rows:
            place = {"table": table, "row": row["place"], "column": column}
            try:
                plain = vault.open(
                    Encrypted(row["key_id"], row["data"]), workspace=row["workspace"], **place
                )
            except TenutoError as error:
                log.error("%s %s keeps its key: %s", table, row["id"], error)  # noqa: TRY400
                continue
            sealed = vault.seal(plain, workspace=row["workspace"], **place)
            fresh.append((row["id"], sealed.key_id, sealed.data))
        return fresh
