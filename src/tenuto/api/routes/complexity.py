"""Complexity levels: where the workspace draws the lines, and what hard tasks require."""

from litestar import get, put
from litestar.params import JSONBody

from tenuto.api.service import InjectedContext
from tenuto.model.limits.complexity import ComplexityRules


@get("/complexity-levels")
async def levels(desk: InjectedContext) -> ComplexityRules:
    """The workspace's rules."""
    return await desk.engine.complexity.get()


@put("/complexity-levels")
async def change(desk: InjectedContext, data: JSONBody[ComplexityRules]) -> ComplexityRules:
    """Change the rules; they hold for tasks submitted from now on."""
    await desk.engine.complexity.set(data)
    return await desk.engine.complexity.get()


HANDLERS = [levels, change]
