"""Routes for complexity levels: their limits, and the requirements of complex tasks."""

from litestar.params import JSONBody

from tenuto.api.operation import ADMIN, READ, operation
from tenuto.api.service import InjectedContext
from tenuto.engine.limits.complexity import ComplexityLevels
from tenuto.model.limits.complexity import ComplexityRules


@operation("GET", "/complexity-levels", READ, remote=ComplexityLevels.get)
async def get_complexity_levels(ctx: InjectedContext) -> ComplexityRules:
    """Returns the complexity rules of the workspace."""
    return await ctx.engine.complexity.get()


@operation("PUT", "/complexity-levels", ADMIN)
async def set_complexity_levels(
    ctx: InjectedContext, data: JSONBody[ComplexityRules]
) -> ComplexityRules:
    """Replaces the complexity rules; they apply to tasks submitted from now on."""
    await ctx.engine.complexity.set(data)
    return await ctx.engine.complexity.get()
