"""The filter of tasks in requests, as a body and as query parameters; both follow from `Filter`."""

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from litestar.params import QueryParameter

from tenuto.api.routes.flow_bodies import StrictBody, body_fields, to_camel
from tenuto.model import bounds
from tenuto.model.tasks.submission import FILTER_FIELDS, Filter

_LISTS = tuple(name for name, field in FILTER_FIELDS.items() if field.default == ())
"""Fields with several values; in a query they are separated by commas."""
_QUERY_LIMITS: dict[str, dict[str, Any]] = {
    "min_priority": {"ge": 1, "le": 10},
    "text": {"max_length": bounds.MAX_TITLE},
}

if TYPE_CHECKING:
    _FilterFields = StrictBody
else:
    _FilterFields = msgspec.defstruct(
        "_FilterFields",
        [body_field for field in FILTER_FIELDS.values() for body_field in body_fields(field)],
        bases=(StrictBody,),
    )


class FilterBody(_FilterFields):
    """A filter of tasks; a task matches if it meets all fields that are set."""

    def to_filter(self) -> Filter:
        values = {name: getattr(self, field.names[0]) for name, field in FILTER_FIELDS.items()}
        return Filter(**values | {name: tuple(values[name]) for name in _LISTS})


def with_filter_parameters(handler: Any) -> Any:
    """Returns the handler with a query parameter per field of `Filter` instead of `where`."""
    signature = inspect.signature(handler)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "where"]
    parameters = [
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *map(_query_parameter, FILTER_FIELDS),
    ]

    @wraps(handler)
    async def handle(**values: Any) -> Any:
        fields = {name: values.pop(name) for name in FILTER_FIELDS}
        fields |= {name: _split_list(fields[name]) for name in _LISTS}
        return await handler(**values, where=Filter(**fields))

    handle.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    handle.__annotations__["return"] = signature.return_annotation
    wrapped: Any = handle
    wrapped.__signature__ = signature.replace(parameters=parameters)
    return wrapped


def _query_parameter(name: str) -> inspect.Parameter:
    """Returns the query parameter of a field of `Filter`, in the form of a function's parameter."""
    field = FILTER_FIELDS[name]
    note = QueryParameter(name=to_camel(field.names[0]), **_QUERY_LIMITS.get(name, {}))
    type_: Any = str | None if name in _LISTS else field.type
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[type_, note]
    )


def _split_list(text: str | None) -> tuple[str, ...]:
    """Splits a text at commas, without empty parts; `None` becomes an empty tuple."""
    return tuple(item for item in (text or "").split(",") if item)
