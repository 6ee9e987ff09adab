"""What a workspace may use."""

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid


class Quota(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What a workspace may use; `None`: as much as it likes."""

    tasks_per_minute: int | None = None
    pending: int | None = None
    running: int | None = None

    def check(self) -> None:
        """Raise `Invalid` unless every number makes sense."""
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) is not None:
                bounds.number(name, value, 0, bounds.MAX_COUNT)

    def check_below(self, ceiling: "Quota") -> None:
        """Raise `Invalid` if a number is above what the operator allows any workspace."""
        for name in self.__struct_fields__:
            value, most = getattr(self, name), getattr(ceiling, name)
            if value is not None and most is not None and value > most:
                raise Invalid(
                    f"{name} may be at most {most:,}, the operator's ceiling quota_{name},"
                    f" not {value:,}",
                    field=name,
                )


def effective(quota: Quota, ceiling: Quota) -> Quota:
    """The quota in force: of each number the lesser of the workspace's and the operator's."""
    return Quota(**{name: _lesser(quota, ceiling, name) for name in Quota.__struct_fields__})


def _lesser(quota: Quota, ceiling: Quota, name: str) -> int | None:
    given = [each for each in (getattr(quota, name), getattr(ceiling, name)) if each is not None]
    return min(given, default=None)


def quota_of(text: str | None) -> Quota:
    """The quota that a workspace's row holds."""
    return Quota() if text is None else msgspec.json.decode(text, type=Quota)
