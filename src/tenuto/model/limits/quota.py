"""Quotas: limits of one workspace."""

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid


class Quota(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Caps on a workspace's new tasks per minute, pending and running tasks; `None`: no cap."""

    tasks_per_minute: int | None = None
    pending: int | None = None
    running: int | None = None

    def check(self) -> None:
        """Raises `Invalid` unless every number is in range."""
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) is not None:
                bounds.check_number(name, value, 0, bounds.MAX_COUNT)

    def check_below(self, ceiling: "Quota") -> None:
        """Raises `Invalid` if a number is above the operator's ceiling for all workspaces."""
        for name in self.__struct_fields__:
            value, maximum = getattr(self, name), getattr(ceiling, name)
            if value is not None and maximum is not None and value > maximum:
                raise Invalid(
                    f"{name} may be at most {maximum:,}, the operator's ceiling quota_{name},"
                    f" not {value:,}",
                    field=name,
                )


def effective_quota(quota: Quota, ceiling: Quota) -> Quota:
    """Returns the quota in force: of each number the lower one of the quota and the ceiling."""
    return Quota(**{name: _lower_limit(quota, ceiling, name) for name in Quota.__struct_fields__})


def _lower_limit(quota: Quota, ceiling: Quota, name: str) -> int | None:
    """Returns the lower of both quotas' numbers of that name; `None` if neither has one."""
    limits = [
        limit for limit in (getattr(quota, name), getattr(ceiling, name)) if limit is not None
    ]
    return min(limits, default=None)


def parse_quota(text: str | None) -> Quota:
    """Returns the quota from the JSON text of a workspace's row; one without caps for `None`."""
    return Quota() if text is None else msgspec.json.decode(text, type=Quota)
