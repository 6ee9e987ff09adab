"""The secrets of tasks: sealed by a submit, opened for an attempt, struck from what it says."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import msgspec

from tenuto.encryption_keys import Encrypted, KeyRing
from tenuto.engine.core import Core
from tenuto.engine.rows import decode
from tenuto.engine.tenancy.secret_use import Claimant, refusals
from tenuto.logs import mask_in_logs
from tenuto.model.bounds import MAX_SECRETS
from tenuto.model.errors import Invalid, TenutoError
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence
from tenuto.model.tenancy import secrets
from tenuto.model.tenancy.redact import MASK, NOTHING, Redactor
from tenuto.store.protocol import Row, Statement

_MOST_KNOWN = 20_000
_LIKE = {"mask": f'%"{MASK}"%', "reference": f'%"{secrets.REFERENCE}"%'}


class EncryptedTasks(msgspec.Struct, frozen=True):
    """Tasks as they may be stored, the rows that seal their secrets, and hashes of these.

    The hashes are by the task's place, one with each key, and worth nothing without the key.
    """

    news: list[NewTask]
    rows: list[tuple[Any, ...]]
    hashes: dict[int, list[str]]


class DecryptedInput(msgspec.Struct, frozen=True):
    """What an attempt is handed, and the secret values in it."""

    input: Any
    env: dict[str, str]
    values: tuple[str, ...]


class _StoredSecrets(msgspec.Struct, frozen=True):
    """What the store has sealed for some tasks: their own by task, and by name."""

    own: dict[UUID, Row]
    named: dict[str, Row]


def vault_of(core: Core) -> KeyRing:
    """The engine's keys, or `Invalid`."""
    if core.vault is None:
        raise Invalid("this program has no keys for secrets", "secrets_unavailable")
    return core.vault


class TaskSecrets:
    """Knows the secrets of tasks while they are leased through this engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._known: dict[int, tuple[int, Redactor]] = {}

    def encrypt_secrets(
        self, news: Sequence[NewTask], ids: Sequence[UUID], workspace: UUID
    ) -> EncryptedTasks:
        """The tasks without what they have under `secrets` in their input, and that, sealed."""
        found = EncryptedTasks(list(news), [], {})
        for index, new in enumerate(news):
            stored, values = secrets.extract_secrets(new.input)
            if values:
                found.news[index] = msgspec.structs.replace(new, input=stored)
                text = msgspec.json.encode(values, order="deterministic")
                found.rows.append(self._sealed(ids[index], workspace, text.decode()))
                found.hashes[index] = [
                    hashlib.blake2b(text, key=key, digest_size=16).hexdigest()
                    for key in vault_of(self._core).derive_all("fingerprint").values()
                ]
        return found

    def _sealed(self, task: UUID, workspace: UUID, text: str) -> tuple[Any, ...]:
        sealed = vault_of(self._core).seal(
            text, workspace=workspace, table="task_secret", row=str(task), column="data"
        )
        return task, workspace, sealed.key_id, sealed.data

    async def check_names(self, texts: Iterable[str | None], workspace: UUID) -> None:
        """Raise `Invalid` unless every secret that the JSON texts name is there."""
        named = [decode(text) for text in texts if secrets.refers(text)]
        if names := secrets.references(named):
            if len(names) > MAX_SECRETS:
                raise Invalid(f"a task names more than {MAX_SECRETS} secrets", "too_large")
            found = await self._named(names, workspace)
            if missing := sorted(names - set(found)):
                raise _unknown(missing[0])

    async def decrypt_request(self, new: NewTask, task: UUID, workspace: UUID) -> NewTask:
        """What a stored task asked for, with the secrets that were left out of it."""
        own = await self._own([task])
        values = self._values(own[task], workspace) if task in own else {}
        return msgspec.structs.replace(new, input=secrets.restore_secrets(new.input, values))

    async def open(
        self, rows: Sequence[Row], claimant: Claimant
    ) -> dict[UUID, DecryptedInput | TenutoError]:
        """What the attempts of these marked tasks of one workspace are handed, or why not."""
        handed: dict[UUID, DecryptedInput | TenutoError] = {}
        try:
            found = await self._find(rows)
            handed |= await refusals(self._core, rows, found.named, claimant)
        except TenutoError as error:
            return {row["id"]: error for row in rows}
        for row in rows:
            if row["id"] in handed:
                continue
            try:
                handed[row["id"]] = self._attempt_input(row, found)
            except TenutoError as error:
                handed[row["id"]] = error
        return handed

    def _attempt_input(self, row: Row, found: _StoredSecrets) -> DecryptedInput:
        task, workspace = row["id"], row["workspace"]
        value, env = decode(row["input"]), decode(row["env"]) or {}
        named = {}
        for name in secrets.references([value, env]):
            if name not in found.named:
                raise _unknown(name)
            named[name] = self._value(found.named[name], workspace)
        own = self._values(found.own[task], workspace) if task in found.own else {}
        return DecryptedInput(
            secrets.restore_secrets(secrets.resolved(value, named), own),
            secrets.resolved(env, named),
            tuple(dict.fromkeys([*own.values(), *named.values()])),
        )

    def remember(self, fence: Fence, values: Sequence[str] = ()) -> None:
        """Know what an attempt was handed."""
        if self._core.vault is not None:
            known = Redactor(values) if values else NOTHING
            self._known[fence.task.int] = (fence.attempt, known)
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def forget(self, fence: Fence) -> None:
        """The attempt is over."""
        self._known.pop(fence.task.int, None)

    def known(self, fence: Fence) -> Redactor | None:
        """What strikes an attempt's secrets, where nothing has to be read for it."""
        if self._core.vault is None:
            return NOTHING
        attempt, known = self._known.get(fence.task.int, (0, NOTHING))
        return known if attempt == fence.attempt else None

    async def redactor(self, fence: Fence) -> Redactor:
        """What strikes an attempt's secrets; raises rather than let pass what it cannot open.

        Of an attempt that was claimed elsewhere the named secrets are taken as they are now.
        """
        if (mine := self.known(fence)) is not None:
            return mine
        attempt, _ = self._known.get(fence.task.int, (0, NOTHING))
        rows = await self._core.store.fetch(Statement("task_marked", {"id": fence.task, **_LIKE}))
        if not rows:
            return NOTHING
        values = await self._all_values(rows[0])
        if attempt < fence.attempt:
            self.remember(fence, values)
        return Redactor(values)

    async def _all_values(self, row: Row) -> list[str]:
        """The secret values of a task, as far as they are still there."""
        if row["input"] is None and row["env"] is None:
            return []
        found, workspace = await self._find([row]), row["workspace"]
        values = [self._value(sealed, workspace) for sealed in found.named.values()]
        for sealed in found.own.values():
            values += self._values(sealed, workspace).values()
        return values

    async def _find(self, rows: Sequence[Row]) -> _StoredSecrets:
        said = [decode(row[name]) for row in rows for name in ("input", "env")]
        own = await self._own([row["id"] for row in rows])
        return _StoredSecrets(
            own, await self._named(secrets.references(said), rows[0]["workspace"])
        )

    async def _own(self, ids: list[UUID]) -> dict[UUID, Row]:
        rows = await self._core.store.fetch(Statement("task_secrets", {"ids": ids}))
        return {row["task"]: row for row in rows}

    async def _named(self, names: set[str], workspace: UUID) -> dict[str, Row]:
        if not names:
            return {}
        params = {"workspace": workspace, "names": sorted(names)}
        rows = await self._core.store.fetch(Statement("secrets_named", params))
        return {row["name"]: row for row in rows}

    def _value(self, row: Row, workspace: UUID) -> str:
        sealed, vault = Encrypted(row["key_id"], row["data"]), vault_of(self._core)
        place = {"table": "secret", "row": row["name"], "column": "data"}
        value = vault.open(sealed, workspace=workspace, **place)
        mask_in_logs([value])
        return value

    def _values(self, row: Row, workspace: UUID) -> dict[str, str]:
        sealed, vault = Encrypted(row["key_id"], row["data"]), vault_of(self._core)
        place = {"table": "task_secret", "row": str(row["task"]), "column": "data"}
        text = vault.open(sealed, workspace=workspace, **place)
        values = msgspec.json.decode(text, type=dict[str, str])
        mask_in_logs(values.values())
        return values


def _unknown(name: str) -> Invalid:
    return Invalid(f"no secret {name[:100]!r} in this workspace", "secret_unknown")


def redact_child(new: NewTask, redactor: Redactor) -> NewTask:
    """A child task with its parent's secrets struck out, but for what it keeps secret itself.

    A key that it shares its places by is refused: struck out, two could become one.
    """
    if new.concurrency is not None and redactor.text(new.concurrency.key) != new.concurrency.key:
        raise Invalid("a concurrency key must not hold a secret", field="concurrency.key")
    value, own = secrets.extract_secrets(new.input)
    said = {name: getattr(new, name) for name in NewTask.__struct_fields__} | {"input": value}
    texts = {
        name: redactor.value(each)
        for name, each in said.items()
        if isinstance(each, str | list | tuple | dict)
    }
    texts["input"] = secrets.restore_secrets(texts.get("input", value), own)
    if (told := new.escalation) is not None:
        texts["escalation"] = Escalation(redactor.text(told.reason), redactor.text(told.prompt))
    return msgspec.structs.replace(new, **texts)
