"""Collects the validation errors of files with their locations, and raises them together."""

import difflib
from collections.abc import Iterable

import msgspec

from tenuto.manifest.yaml_nodes import SourceLocation, YamlError
from tenuto.model.errors import Invalid

MAX_LISTED = 100
"""Maximum number of validation errors that are listed."""


class ManifestError(msgspec.Struct, frozen=True):
    """One validation error. `path` is the path to the value, such as `tasks[0].retry`."""

    location: SourceLocation
    path: str
    reason: str
    code: str

    def __str__(self) -> str:
        text = f"{self.path}: {self.reason}" if self.path else self.reason
        return f"{location_prefix(self.location)}{text}"


def location_prefix(location: SourceLocation) -> str:
    """Returns a location as the start of a message line, such as `flow.yaml:12:5: `."""
    text = ":".join(str(part) for part in (location.file, location.line, location.column) if part)
    return f"{text}: " if text else ""


class ManifestErrors:
    """Collects validation errors."""

    def __init__(self) -> None:
        self._errors: list[ManifestError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(
        self, location: SourceLocation, path: str, reason: str, code: str = "yaml_invalid"
    ) -> None:
        """Adds a validation error; `path` is the path to the value, or empty."""
        self._errors.append(ManifestError(location, path, reason, code))

    def add_yaml_error(self, error: YamlError) -> None:
        """Adds an error of the YAML parser."""
        self.add(error.location, "", error.reason, error.code)

    def add_invalid(self, location: SourceLocation, path: str, error: Invalid) -> None:
        """Adds an error of the model; removes the field name from the start of its message."""
        field = str(error.details.get("field", ""))
        reason = error.message.removeprefix(f"{field} ") if field else error.message
        self.add(location, path, reason, error.code)

    def raise_if_any(self) -> None:
        """Raises `Invalid` if there are errors; lists the first `MAX_LISTED` by location."""
        if not self._errors:
            return
        errors = sorted(self._errors, key=lambda error: msgspec.structs.astuple(error.location))
        lines = [str(error) for error in errors[:MAX_LISTED]]
        if len(errors) > MAX_LISTED:
            lines.append(f"... and {len(errors) - MAX_LISTED:,} more")
        first = errors[0]
        raise Invalid(
            "\n".join(lines),
            first.code,
            file=first.location.file,
            line=first.location.line,
            column=first.location.column,
            field=first.path or None,
        )


def unknown_field_message(name: str, names: Iterable[str]) -> str:
    """Returns the message for an unknown field, with the most similar known name."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f"unknown field {name[:60]!r}" + (f"; did you mean {matches[0]!r}?" if matches else "")
