"""What is wrong with files, all of it: each fault with its place, told together in the end."""

import difflib
from collections.abc import Iterable

import msgspec

from tenuto.manifest.yaml_nodes import SourceLocation, YamlError
from tenuto.model.errors import Invalid

MOST = 100
"""Faults that are told one by one."""


class ManifestError(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    place: SourceLocation
    where: str
    why: str
    code: str

    def __str__(self) -> str:
        said = f"{self.where}: {self.why}" if self.where else self.why
        return f"{prefix(self.place)}{said}"


def prefix(place: SourceLocation) -> str:
    """The beginning of a line about something there, as `flow.yaml:12:5: `."""
    said = ":".join(str(part) for part in (place.file, place.line, place.column) if part)
    return f"{said}: " if said else ""


class ManifestErrors:
    """A list to note faults in."""

    def __init__(self) -> None:
        self._found: list[ManifestError] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, place: SourceLocation, where: str, why: str, code: str = "yaml_invalid") -> None:
        """One more fault; `where` is the way to the value, if it has one."""
        self._found.append(ManifestError(place, where, why, code))

    def unreadable(self, error: YamlError) -> None:
        self.note(error.place, "", error.why, error.code)

    def refused(self, place: SourceLocation, where: str, error: Invalid) -> None:
        """What the model says of a value; it names the field first, as we do."""
        field = str(error.details.get("field", ""))
        why = error.message.removeprefix(f"{field} ") if field else error.message
        self.note(place, where, why, error.code)

    def raise_any(self) -> None:
        """Raise `Invalid` with everything noted, in the order of the files; nothing without any."""
        if not self._found:
            return
        found = sorted(self._found, key=lambda each: msgspec.structs.astuple(each.place))
        lines = [str(fault) for fault in found[:MOST]]
        if len(found) > MOST:
            lines.append(f"... and {len(found) - MOST:,} more")
        first = found[0]
        raise Invalid(
            "\n".join(lines),
            first.code,
            file=first.place.file,
            line=first.place.line,
            column=first.place.column,
            field=first.where or None,
        )


def unknown(name: str, known: Iterable[str]) -> str:
    """That nobody knows a name, and which one may have been meant."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"there is no field {name[:60]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
