"""Secrets of tasks: encrypted at submit, decrypted for an attempt, redacted in its reports."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import msgspec

from tenuto.encryption_keys import Encrypted, KeyRing
from tenuto.engine.core import Core, KnownAttempt
from tenuto.engine.rows import decode_json
from tenuto.engine.tenancy.secret_use import Claimant, secret_errors
from tenuto.logs import mask_in_logs
from tenuto.model.bounds import MAX_SECRETS
from tenuto.model.errors import Invalid, TenutoError
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence
from tenuto.model.tenancy import secrets
from tenuto.model.tenancy.redact import MASK, NO_SECRETS, Redactor
from tenuto.store.protocol import Row, Statement

_LIKE_PATTERNS = {"mask": f'%"{MASK}"%', "reference": f'%"{secrets.REFERENCE}"%'}


class EncryptedTasks(msgspec.Struct, frozen=True):
    """Tasks without their secrets, the rows with the encrypted secrets, and their hashes.

    The hashes are by the task's index in `new_tasks`, one per encryption key. They are keyed:
    without the key they reveal nothing.
    """

    new_tasks: list[NewTask]
    rows: list[tuple[Any, ...]]
    hashes: dict[int, list[str]]


class DecryptedInput(msgspec.Struct, frozen=True):
    """The input and environment of an attempt, and the secret values in them."""

    input: Any
    env: dict[str, str]
    values: tuple[str, ...]


class _StoredSecrets(msgspec.Struct, frozen=True):
    """Encrypted rows of some tasks: own secrets by task id, and named secrets by name."""

    own: dict[UUID, Row]
    named: dict[str, Row]


def require_key_ring(core: Core) -> KeyRing:
    """Returns the engine's key ring; raises `Invalid` if no encryption key is configured."""
    if core.key_ring is None:
        raise Invalid("no encryption key is configured; set TENUTO_KEYS", "secrets_unavailable")
    return core.key_ring


class TaskSecrets:
    """Encrypts and decrypts the secrets of tasks, and redacts them in reports."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def encrypt_secrets(
        self, new_tasks: Sequence[NewTask], ids: Sequence[UUID], workspace: UUID
    ) -> EncryptedTasks:
        """Returns the tasks without values under `secrets`, and these encrypted; stores nothing."""
        result = EncryptedTasks(list(new_tasks), [], {})
        for index, new in enumerate(new_tasks):
            stored, values = secrets.extract_secrets(new.input)
            if values:
                result.new_tasks[index] = msgspec.structs.replace(new, input=stored)
                text = msgspec.json.encode(values, order="deterministic")
                result.rows.append(self._encrypted_row(ids[index], workspace, text.decode()))
                result.hashes[index] = [
                    hashlib.blake2b(text, key=key, digest_size=16).hexdigest()
                    for key in require_key_ring(self._core).derive_all("fingerprint").values()
                ]
        return result

    def _encrypted_row(self, task: UUID, workspace: UUID, text: str) -> tuple[Any, ...]:
        """Returns the row with the encrypted secrets of a task; `text` is their JSON."""
        encrypted = require_key_ring(self._core).encrypt(
            text, workspace=workspace, table="task_secret", row=str(task), column="data"
        )
        return task, workspace, encrypted.key_id, encrypted.data

    async def check_names(self, texts: Iterable[str | None], workspace: UUID) -> None:
        """Raises `Invalid` if the JSON texts name a secret that the workspace does not have."""
        values = [decode_json(text) for text in texts if secrets.may_have_references(text)]
        if names := secrets.referenced_names(values):
            if len(names) > MAX_SECRETS:
                text = f"the task names {len(names)} secrets, more than {MAX_SECRETS}"
                raise Invalid(text, "too_large")
            stored = await self._load_named(names, workspace)
            if missing := sorted(names - set(stored)):
                raise _unknown_secret_error(missing[0])

    async def decrypt_request(self, new: NewTask, task: UUID, workspace: UUID) -> NewTask:
        """Returns the task's request with its own secrets put back into the input."""
        own = await self._load_own([task])
        values = self._decrypt_own(own[task], workspace) if task in own else {}
        return msgspec.structs.replace(new, input=secrets.restore_secrets(new.input, values))

    async def decrypt_inputs(
        self, rows: Sequence[Row], claimant: Claimant
    ) -> dict[UUID, DecryptedInput | TenutoError]:
        """Returns by task id the decrypted input and `env`, or the error if the agent gets none.

        The claimed tasks are of one workspace.
        """
        results: dict[UUID, DecryptedInput | TenutoError] = {}
        try:
            stored = await self._load_secrets(rows)
            results |= await secret_errors(self._core, rows, stored.named, claimant)
        except TenutoError as error:
            return {row["id"]: error for row in rows}
        for row in rows:
            if row["id"] in results:
                continue
            try:
                results[row["id"]] = self._attempt_input(row, stored)
            except TenutoError as error:
                results[row["id"]] = error
        return results

    def _attempt_input(self, row: Row, stored: _StoredSecrets) -> DecryptedInput:
        """Returns one task's input with all its secrets; raises `Invalid` if one is missing."""
        task, workspace = row["id"], row["workspace"]
        value, env = decode_json(row["input"]), decode_json(row["env"]) or {}
        named = {}
        for name in secrets.referenced_names([value, env]):
            if name not in stored.named:
                raise _unknown_secret_error(name)
            named[name] = self._decrypt_named(stored.named[name], workspace)
        own = self._decrypt_own(stored.own[task], workspace) if task in stored.own else {}
        return DecryptedInput(
            secrets.restore_secrets(secrets.resolve_references(value, named), own),
            secrets.resolve_references(env, named),
            tuple(dict.fromkeys([*own.values(), *named.values()])),
        )

    async def redactor(self, fence: Fence) -> Redactor:
        """Returns the redactor of an attempt's secrets, and caches it; raises if decryption fails.

        For an attempt that another process claimed, the named secrets have their current values.
        """
        if (attempt := self._core.known_attempts.find(fence)) is not None:
            return attempt.redactor or NO_SECRETS
        if self._core.key_ring is None:
            return NO_SECRETS
        rows = await self._core.store.fetch(
            Statement("task_secret_marks", {"id": fence.task, **_LIKE_PATTERNS})
        )
        if not rows:
            return NO_SECRETS
        values = await self._all_values(rows[0])
        redactor = Redactor(values)
        if fence.is_possible():
            attempt = KnownAttempt(fence.attempt, redactor if values else None)
            self._core.known_attempts.add(fence.task, attempt)
        return redactor

    async def _all_values(self, row: Row) -> list[str]:
        """Returns the decrypted secret values of a task, except secrets that were deleted."""
        if row["input"] is None and row["env"] is None:
            return []
        stored, workspace = await self._load_secrets([row]), row["workspace"]
        values = [self._decrypt_named(encrypted, workspace) for encrypted in stored.named.values()]
        for encrypted in stored.own.values():
            values += self._decrypt_own(encrypted, workspace).values()
        return values

    async def _load_secrets(self, rows: Sequence[Row]) -> _StoredSecrets:
        """Reads the encrypted secrets that tasks of one workspace have or name."""
        values = [decode_json(row[name]) for row in rows for name in ("input", "env")]
        own = await self._load_own([row["id"] for row in rows])
        return _StoredSecrets(
            own, await self._load_named(secrets.referenced_names(values), rows[0]["workspace"])
        )

    async def _load_own(self, ids: list[UUID]) -> dict[UUID, Row]:
        """Returns the rows of the tasks' own secrets, by task id."""
        rows = await self._core.store.fetch(Statement("task_secrets", {"ids": ids}))
        return {row["task"]: row for row in rows}

    async def _load_named(self, names: set[str], workspace: UUID) -> dict[str, Row]:
        """Returns the rows of the named secrets that exist, by name."""
        if not names:
            return {}
        params = {"workspace": workspace, "names": sorted(names)}
        rows = await self._core.store.fetch(Statement("secrets_by_name", params))
        return {row["name"]: row for row in rows}

    def _decrypt_named(self, row: Row, workspace: UUID) -> str:
        """Returns the value of a named secret, and masks it in logs from now on."""
        encrypted, key_ring = Encrypted(row["key_id"], row["data"]), require_key_ring(self._core)
        location = {"table": "secret", "row": row["name"], "column": "data"}
        value = key_ring.decrypt(encrypted, workspace=workspace, **location)
        mask_in_logs([value])
        return value

    def _decrypt_own(self, row: Row, workspace: UUID) -> dict[str, str]:
        """Returns a task's own secrets by key, and masks them in logs from now on."""
        encrypted, key_ring = Encrypted(row["key_id"], row["data"]), require_key_ring(self._core)
        location = {"table": "task_secret", "row": str(row["task"]), "column": "data"}
        text = key_ring.decrypt(encrypted, workspace=workspace, **location)
        values = msgspec.json.decode(text, type=dict[str, str])
        mask_in_logs(values.values())
        return values


def _unknown_secret_error(name: str) -> Invalid:
    text = f"no secret {name[:100]!r} in this workspace"
    return Invalid(f'{text}; create it with "orchestrate secret set"', "secret_unknown")


def redact_child(new: NewTask, redactor: Redactor) -> NewTask:
    """Returns a subtask with its parent's secrets redacted; `Invalid`: one in the concurrency key.

    Its own `secrets` stay. Redacted, two concurrency keys could be equal.
    """
    if (
        new.concurrency is not None
        and redactor.redact_text(new.concurrency.key) != new.concurrency.key
    ):
        raise Invalid("the concurrency key must not contain a secret", field="concurrency.key")
    value, own_secrets = secrets.extract_secrets(new.input)
    fields = {name: getattr(new, name) for name in NewTask.__struct_fields__} | {"input": value}
    texts = {
        name: redactor.redact_value(field_value)
        for name, field_value in fields.items()
        if isinstance(field_value, str | list | tuple | dict)
    }
    texts["input"] = secrets.restore_secrets(texts.get("input", value), own_secrets)
    if (escalation := new.escalation) is not None:
        texts["escalation"] = Escalation(
            redactor.redact_text(escalation.reason), redactor.redact_text(escalation.prompt)
        )
    return msgspec.structs.replace(new, **texts)
