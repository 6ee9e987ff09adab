"""Faults as data: file, old text, new text, and the tests that must notice the fault.

An area is a file of `areas/`; each of its tables is a fault. `old` stands once in the file.
"""

import tomllib
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
AREAS = Path(__file__).with_name("areas")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault that somebody could write by mistake."""

    file: str
    old: str
    new: str
    tests: list[str]
    """What pytest is told: files, folders, or tests."""
    only: str = ""
    """An expression for `pytest -k`."""
    survives: str = ""
    """Why no test can notice it, where that is so."""


def areas() -> dict[str, dict[str, Fault]]:
    """The faults of every area, by name."""
    return {path.stem: read(path) for path in sorted(AREAS.glob("*.toml"))}


def read(path: Path) -> dict[str, Fault]:
    """The faults of one file; raises `msgspec.ValidationError` for one that is none."""
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, Fault])


def planted(fault: Fault, text: str) -> str:
    """The text of the fault's file with the fault in it; raises `ValueError` if it does not fit."""
    result = text.count(fault.old)
    if result != 1 or fault.old == fault.new:
        raise ValueError(f"{fault.file} has the text {result} times: {fault.old!r}")
    return text.replace(fault.old, fault.new)
