"""Encryption: values decrypt only in their place; weak or exposed key rings are refused."""

import json
import multiprocessing
import stat
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.encryption_keys import FILE, Encrypted, KeyRing, add_key, load_ring
from tenuto.model.errors import Incompatible, Invalid

HERE: dict[str, Any] = {
    "workspace": UUID(int=1),
    "table": "secret",
    "row": "token",
    "column": "data",
}
KEY = bytes(range(32))


def spelled(key_id: str, key: bytes) -> str:
    return f"{key_id}:{b64encode(key).decode()}"


def unreadable(vault: KeyRing, sealed: Encrypted, position: dict[str, Any] = HERE) -> bool:
    with pytest.raises(Incompatible) as caught:
        vault.decrypt(sealed, **position)
    return caught.value.code == "secret_unreadable"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encrypted_value_decrypts_in_its_place(plain: str) -> None:
    vault = KeyRing({"k1": KEY})
    sealed = vault.encrypt(plain, **HERE)
    assert vault.decrypt(sealed, **HERE) == plain
    assert sealed.key_id == "k1"
    assert sealed.data != vault.encrypt(plain, **HERE).data


@pytest.mark.parametrize(
    "other",
    [{"workspace": UUID(int=2)}, {"table": "webhook"}, {"row": "token2"}, {"column": "secret"}],
    ids=lambda other: next(iter(other)),
)
def test_encrypted_value_decrypts_nowhere_else(other: dict[str, Any]) -> None:
    vault = KeyRing({"k1": KEY})
    assert unreadable(vault, vault.encrypt("value", **HERE), HERE | other)


def test_associated_data_of_two_places_differs() -> None:
    vault = KeyRing({"k1": KEY})
    sealed = vault.encrypt("value", **HERE | {"table": "a", "row": "b,c"})
    assert unreadable(vault, sealed, HERE | {"table": "a,b", "row": "c"})


def test_encrypted_value_belongs_to_its_key() -> None:
    vault = KeyRing({"k1": KEY, "k2": KEY[::-1]})
    sealed = vault.encrypt("value", **HERE)
    assert unreadable(vault, Encrypted("k2", sealed.data))
    assert unreadable(vault, Encrypted("k3", sealed.data))
    # The same key under another id: the id is bound too.
    assert unreadable(KeyRing({"k3": KEY}), Encrypted("k3", sealed.data))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_altered_byte_is_detected(index: int, flip: int) -> None:
    vault = KeyRing({"k1": KEY})
    raw = bytearray(b64decode(vault.encrypt("value", **HERE).data))
    raw[index % len(raw)] ^= flip
    assert unreadable(vault, Encrypted("k1", b64encode(raw).decode()))


@pytest.mark.parametrize("data", ["", "AAAA", "not base64!", "AAAAAAAAAAAAAAAA"])
def test_value_that_is_not_encrypted_is_unreadable(data: str) -> None:
    assert unreadable(KeyRing({"k1": KEY}), Encrypted("k1", data))


def test_purposes_have_separate_keys() -> None:
    vault = KeyRing({"k2": KEY[::-1], "k1": KEY})
    matches = [vault.derive("jwt"), vault.derive("fingerprint"), vault.derive("seal"), KEY[::-1]]
    assert len(set(matches)) == len(matches)
    assert {len(item) for item in matches} == {32}
    assert list(vault.derive_all("jwt")) == ["k2", "k1"]
    assert vault.derive_all("jwt")["k2"] == vault.derive("jwt") == matches[0]
    assert KeyRing({"k1": KEY}).derive("jwt") == vault.derive_all("jwt")["k1"]


def test_key_setting_lists_the_current_key_first(tmp_path: Path) -> None:
    text = f"{spelled('new', KEY[::-1])}, {spelled('old', KEY)}"
    vault = load_ring(tmp_path, text)
    assert (vault.current, vault.key_ids) == ("new", ("new", "old"))
    assert vault.decrypt(KeyRing({"old": KEY}).encrypt("value", **HERE), **HERE) == "value"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "k1",
        "k1:",
        ":" + b64encode(KEY).decode(),
        "k 1:" + b64encode(KEY).decode(),
        "x" * 33 + ":" + b64encode(KEY).decode(),
        spelled("k1", KEY[:31]),
        spelled("k1", KEY + b"x"),
        spelled("k1", bytes(32)),
        spelled("k1", b"\xff" * 32),
        f"k1:{b64encode(KEY).decode()[:-2]}!=",
        f"{spelled('k1', KEY)},{spelled('k1', KEY[::-1])}",
        f"{spelled('k1', KEY)},",
        ",".join(spelled(f"k{n}", KEY) for n in range(101)),
    ],
)
def test_invalid_key_ring_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(Invalid) as caught:
        load_ring(tmp_path, text)
    assert caught.value.code == "keys_invalid"
    assert b64encode(KEY).decode()[:8] not in str(caught.value)


def test_missing_key_file_is_created_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "data"
    vault = load_ring(folder, None)
    path = folder / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    sealed = vault.encrypt("value", **HERE)
    again = load_ring(folder, "")
    assert again.current == vault.current
    assert again.decrypt(sealed, **HERE) == "value"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    load_ring(tmp_path, None)
    (tmp_path / FILE).chmod(mode)
    with pytest.raises(Invalid, match="chmod 600") as caught:
        load_ring(tmp_path, None)
    assert caught.value.code == "keys_invalid"


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[]", '["k1"]', "\xff"])
def test_damaged_key_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / FILE
    path.touch(0o600)
    path.write_text(content, "latin-1")
    with pytest.raises(Invalid) as caught:
        load_ring(tmp_path, None)
    assert caught.value.code == "keys_invalid"


def test_key_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Invalid) as caught:
        load_ring(tmp_path / "file" / "data", None)
    assert caught.value.code == "keys_invalid"


def test_key_can_be_added(tmp_path: Path) -> None:
    first = load_ring(tmp_path, None)
    sealed = first.encrypt("value", **HERE)
    second = add_key(tmp_path)
    assert second.key_ids[1:] == first.key_ids
    assert second.decrypt(sealed, **HERE) == "value"
    assert load_ring(tmp_path, None).current == second.current
    # A process that runs on learns of the new key when it meets it.
    assert first.decrypt(second.encrypt("new", **HERE), **HERE) == "new"
    assert first.current == second.current


def test_half_written_key_file_of_a_crash_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.new").write_text("half")
    vault = load_ring(tmp_path, None)
    assert json.loads((tmp_path / FILE).read_text())[0].startswith(vault.current)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, f"{FILE}.lock"}


def _start(folder: str, barrier: Any, result: Any, work: str) -> None:
    barrier.wait()
    vault = load_ring(Path(folder), None) if work == "load" else add_key(Path(folder))
    result.put(vault.current)


@pytest.mark.parametrize("work", ["load", "add"])
def test_concurrent_processes_create_one_key(tmp_path: Path, work: str) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, result, n = context.Barrier(4), context.Queue(), 4
    arguments = (str(tmp_path), barrier, result, work)
    processes = [context.Process(target=_start, args=arguments) for _ in range(n)]
    for process in processes:
        process.start()
    currents = {result.get(timeout=60) for _ in range(n)}
    for process in processes:
        process.join(60)
    ring = load_ring(tmp_path, None).key_ids
    # No key that anybody was told of may be lost: something may be sealed with it.
    assert currents == set(ring) if work == "add" else currents == {ring[0]}
    assert len(ring) == (n if work == "add" else 1)
