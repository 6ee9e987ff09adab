"""Routes for complexity levels: their limits, and the requirements of complex tasks."""

from litestar import get, put
from litestar.params import JSONBody

from tenuto.api.service import InjectedContext
from tenuto.model.limits.complexity import ComplexityRules


@get("/complexity-levels")
async def get_complexity_levels(ctx: InjectedContext) -> ComplexityRules:
    """Returns the complexity rules of the workspace."""
    return await ctx.engine.complexity.get()


@put("/complexity-levels")
async def set_complexity_levels(
    ctx: InjectedContext, data: JSONBody[ComplexityRules]
) -> ComplexityRules:
    """Replaces the complexity rules; they apply to tasks submitted from now on."""
    await ctx.engine.complexity.set(data)
    return await ctx.engine.complexity.get()


HANDLERS = [get_complexity_levels, set_complexity_levels]
