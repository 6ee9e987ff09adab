"""Where a workspace draws the lines between easy and hard tasks."""

from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.model.limits import complexity
from tenuto.model.limits.complexity import ComplexityRules
from tenuto.store.protocol import Script, Statement


class ComplexityLevels:
    """The rules of one workspace."""

    def __init__(self, core: Core, workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace

    async def get(self) -> ComplexityRules:
        """The rules as they are."""
        await self._core.lanes.reload_if_changed(self._workspace)
        return await self._core.lanes.complexity(self._workspace)

    async def set(self, rules: ComplexityRules) -> None:
        """Change the rules; they hold for tasks submitted from now on."""
        complexity.check(rules)
        text = msgspec.json.encode(rules).decode()

        def script() -> Script[None]:
            yield Statement("complexity_set", {"workspace": self._workspace, "rules": text})

        await self._core.store.once(script)
        await self._core.lanes.reload_if_changed(self._workspace)
