"""Secrets: a workspace's values by name, and the change from older keys to the current one."""

import logging
from collections.abc import Sequence
from uuid import UUID

from tenuto.engine.core import Core
from tenuto.engine.sealing import vault_of
from tenuto.engine.views import SecretView
from tenuto.model import limits
from tenuto.model.errors import Invalid, NotFound, TenutoError
from tenuto.model.secrets import check_name, check_value
from tenuto.store.protocol import Row, Script, Statement
from tenuto.vault import Sealed

log = logging.getLogger("tenuto.engine")

BATCH = 500


class Secrets:
    """The named secrets of one workspace, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def put(self, name: str, value: str) -> None:
        """Keep a value under a name, in place of any other; tasks get it by their next claim."""
        check_name(name)
        check_value("value", value)
        sealed = vault_of(self._core).seal(
            value, workspace=self._workspace, table="secret", row=name, column="data"
        )
        params = {
            "id": self._core.clock.new_id(),
            "workspace": self._workspace,
            "name": name,
            "key_id": sealed.key_id,
            "data": sealed.data,
            "actor": self._actor,
            "now": self._core.now(),
            "most": limits.MAX_NAMED_SECRETS,
        }
        if not await self._once(Statement("secret_put", params)):
            raise Invalid(
                f"the workspace has {limits.MAX_NAMED_SECRETS:,} secrets already", "too_large"
            )

    async def list(self) -> Sequence[SecretView]:
        """The secrets in order of their names, without their values."""
        params = {"workspace": self._workspace, "most": limits.MAX_NAMED_SECRETS}
        rows = await self._core.store.fetch(Statement("secrets", params))
        return [SecretView(**row) for row in rows]

    async def delete(self, name: str) -> None:
        """Forget a secret; tasks that name it can no longer start."""
        check_name(name)
        params = {"workspace": self._workspace, "name": name}
        if not await self._once(Statement("secret_delete", params)):
            raise NotFound(f"no secret {name!r}")

    async def _once(self, statement: Statement) -> Sequence[Row]:
        def script() -> Script[Sequence[Row]]:
            rows: Sequence[Row] = yield statement
            return rows

        return await self._core.store.once(script)


class Rotating:
    """The change of keys, for every workspace that the core sees."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def rotate_once(self, limit: int = BATCH) -> int:
        """Seal up to so many values of older keys with the current one; answers how many.

        What cannot be opened stays as it is.
        """
        limits.number("limit", limit, 1, limits.MAX_BULK)
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
                    Sealed(row["key_id"], row["data"]), workspace=row["workspace"], **place
                )
            except TenutoError as error:
                log.error("%s %s keeps its key: %s", table, row["id"], error)  # noqa: TRY400
                continue
            sealed = vault.seal(plain, workspace=row["workspace"], **place)
            fresh.append((row["id"], sealed.key_id, sealed.data))
        return fresh
