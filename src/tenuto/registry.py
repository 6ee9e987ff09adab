"""Adapters by name or URL scheme: built-in ones, and those of installed packages as entry points.

An adapter is imported when it is first used, so that a command imports only what it needs.
"""

import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tenuto.model.errors import Invalid

_MAX_REASON_CHARS = 300


class Registry:
    """The adapters of one port. A built-in adapter hides an entry point of the same name."""

    def __init__(self, kind: str, built_in: Mapping[str, str], group: str | None = None) -> None:
        self._kind = kind
        self._built_in = built_in
        self._group = group

    def __contains__(self, name: str) -> bool:
        return name in self._built_in or bool(self._entry_points(name))

    def load(self, name: str) -> Any:
        """Imports an adapter and returns its factory; `Invalid` if it is unknown or broken."""
        if path := self._built_in.get(name):
            module, _, attribute = path.partition(":")
            return getattr(importlib.import_module(module), attribute)
        points = self._entry_points(name)
        if not points:
            names = {*self._built_in, *(point.name for point in self._entry_points())}
            raise Invalid(f"there is no {self._kind} {name!r}; known: {', '.join(sorted(names))}")
        try:
            return points[0].load()
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON_CHARS]
            target = points[0].value
            raise Invalid(f"cannot load the {self._kind} {name!r} ({target}): {reason}") from error

    def _entry_points(self, name: str | None = None) -> list[EntryPoint]:
        """Returns the installed entry points of the port, or only those with this name."""
        if self._group is None:
            return []
        points = entry_points(group=self._group)
        return list(points if name is None else points.select(name=name))


BROKERS = Registry(
    "broker",
    {
        "memory": "tenuto.broker.memory:create",
        "sqlite": "tenuto.broker.local:create",
        "postgresql": "tenuto.broker.postgres:create",
        "postgres": "tenuto.broker.postgres:create",
    },
    "tenuto.brokers",
)
"""Brokers of hints by URL scheme: functions of a `BrokerContext` that return `Wakeups`."""

RUNTIMES = Registry(
    "runtime",
    {
        "command": "tenuto.worker.runtime.command:create",
        "function": "tenuto.worker.runtime.function:create",
    },
    "tenuto.runtimes",
)
"""Runtimes by name: functions of a `RuntimeContext` that return a `Runtime`."""

GATEWAYS = Registry(
    "gateway",
    {
        "http": "tenuto.coordinator.gateway:HttpGateway",
        "https": "tenuto.coordinator.gateway:HttpGateway",
    },
    "tenuto.gateways",
)
"""Clients of gateways by URL scheme: functions that take what `HttpGateway` takes."""

STORES = Registry(
    "database",
    {
        "sqlite": "tenuto.app:create_sqlite_store",
        "postgresql": "tenuto.app:create_postgres_store",
        "postgres": "tenuto.app:create_postgres_store",
    },
)
"""Stores by URL scheme: functions of the URL. The queries are written for these databases only."""


def scheme_of(url: str) -> str:
    """Returns the part of a URL before the colon, which names its adapter."""
    return url.partition(":")[0]
