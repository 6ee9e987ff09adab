"""What a workspace may use."""

import msgspec

from tenuto.model import limits


class Quota(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What a workspace may use; `None`: as much as it likes."""

    tasks_per_minute: int | None = None
    pending: int | None = None
    running: int | None = None

    def check(self) -> None:
        """Raise `Invalid` unless every number makes sense."""
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) is not None:
                limits.number(name, value, 0, limits.MAX_COUNT)


def quota_of(text: str | None) -> Quota:
    """The quota that a workspace's row holds."""
    return Quota() if text is None else msgspec.json.decode(text, type=Quota)
