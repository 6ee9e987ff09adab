"""Stores the rules that map a workspace's tasks to complexity levels."""

from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.model.limits import complexity
from tenuto.model.limits.complexity import ComplexityRules
from tenuto.store.protocol import Script, Statement


class ComplexityLevels:
    """The complexity rules of one workspace."""

    def __init__(self, core: Core, workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace

    async def get(self) -> ComplexityRules:
        """Returns the current rules."""
        await self._core.lanes.reload_if_changed(self._workspace)
        return await self._core.lanes.complexity(self._workspace)

    async def set(self, rules: ComplexityRules) -> None:
        """Replaces the rules for tasks submitted from now on; raises `Invalid`."""
        complexity.check(rules)
        text = msgspec.json.encode(rules).decode()

        def script() -> Script[None]:
            yield Statement("complexity_set", {"workspace": self._workspace, "rules": text})

        await self._core.store.transact_one(script)
        await self._core.lanes.reload_if_changed(self._workspace)
