"""The field table: what the program knows of a field, written once beside the field.

`NewTask` and `Filter` annotate their fields with `Field`. The checks, REST bodies, YAML files,
reruns, rows and columns, and the removal of payloads are derived from these annotations.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import check_key

Part = Literal["body", "body.rare", "body.placed", "hot", "hot.timed", "hot.placed"]
"""A part of the new rows in `task_body` (body) or `task` (hot).

Most tasks fill the columns of `body` and `hot`; an insert leaves out a part that no task fills.
"""


class Limit(msgspec.Struct, frozen=True):
    """The check of a value, which raises `Invalid`, and the same limit as JSON Schema.

    `items` is the limit of each item of a list.
    """

    check: Callable[[str, Any], object]
    json_schema: Mapping[str, Any] = {}
    items: "Limit | None" = None


class Field(msgspec.Struct, frozen=True):
    """What the program knows of one field. `fields_of` sets name, type and default."""

    limit: Limit | None = None
    """The check of every value but `None`."""
    names: tuple[str, ...] = ()
    """Names in REST bodies (there in camelCase) and YAML files; by default the field's own.

    Clients send and exports write the first one.
    """
    yaml: tuple[str, ...] = ()
    """Names in YAML files, if they differ from `names`."""
    definition: bool = True
    """False if a definition must not have the field, because it belongs to one run."""
    rerun: bool = True
    """False if a rerun does not repeat the field."""
    column: Part | None = "body.rare"
    """The part of the rows with the column of the same name; `None` if stored elsewhere."""
    sql: str | None = None
    """The type of the column, if it does not follow from the type of the field."""
    payload: bool = False
    """True if the column is emptied when the contents of a task are removed."""
    filter: bool = False
    """True if `Filter` has a field of the same name that selects equal values."""
    name: str = ""
    type: Any = None
    default: Any = None


@cache
def fields_of(struct: type[msgspec.Struct]) -> Mapping[str, Field]:
    """Returns the annotated fields of a struct by name, in order."""
    return {info.name: _field(info) for info in msgspec.structs.fields(struct)}


def _field(info: msgspec.structs.FieldInfo) -> Field:
    """Returns the field's `Field` annotation, or an empty one, with its name, type and default."""
    type_, about = info.type, Field()
    if get_origin(type_) is Annotated:
        type_, *notes = get_args(type_)
        about = next((note for note in notes if isinstance(note, Field)), about)
    return msgspec.structs.replace(
        about,
        name=info.name,
        type=type_,
        default=info.default,
        names=about.names or (info.name,),
        yaml=about.yaml or about.names or (info.name,),
    )


def value_type(field: Field) -> Any:
    """Returns the type of a field's values without `None`."""
    if get_origin(field.type) not in (Union, UnionType):
        return field.type
    return Union[tuple(kind for kind in get_args(field.type) if kind is not NoneType)]  # noqa: UP007


def text_limit(max_length: int, *, empty: bool = True) -> Limit:
    """Returns the limit of a text."""
    shortest = {} if empty else {"minLength": 1}
    return Limit(
        lambda field, value: bounds.check_text(field, value, max_length, empty=empty),
        {**shortest, "maxLength": max_length},
    )


def whole_limit(minimum: int, maximum: int) -> Limit:
    """Returns the limit of a whole number."""
    return Limit(
        lambda field, value: bounds.check_whole(field, value, minimum, maximum),
        {"minimum": minimum, "maximum": maximum},
    )


def list_limit(items: Limit, maximum: int, json_schema: Mapping[str, Any]) -> Limit:
    """Returns the limit of a list of up to `maximum` texts; `json_schema` is published."""

    def check(field: str, values: Sequence[str]) -> None:
        if isinstance(values, str):  # a text is a sequence of texts, too
            raise Invalid(f"{field} must be a list of texts, not one text", field=field)
        if len(values) > maximum:
            raise Invalid(f"{field} has more than {maximum:,} entries", "too_large", field=field)
        for value in values:
            items.check(field, value)

    return Limit(check, json_schema, items)


def _check_tags(field: str, tags: Sequence[str]) -> None:
    for tag in tags:
        bounds.check_text(field, tag, bounds.MAX_NAME)


TITLE = text_limit(bounds.MAX_TITLE, empty=False)
TEXT = text_limit(bounds.MAX_TEXT)
NAME = text_limit(bounds.MAX_NAME, empty=False)
KEY = Limit(check_key, {**NAME.json_schema, "pattern": "^[A-Za-z0-9][A-Za-z0-9._:/-]*$"})
LABELS = list_limit(NAME, bounds.MAX_TAGS, {"maxItems": bounds.MAX_TAGS})
KEYS = list_limit(KEY, bounds.MAX_DEPENDENCIES, {})
SECONDS = whole_limit(1, bounds.MAX_SECONDS)
MINUTES = whole_limit(1, bounds.MAX_SECONDS // 60)
PRIORITY = whole_limit(1, 10)
ATTEMPTS = whole_limit(1, bounds.MAX_ATTEMPTS)
TURNS = Limit(lambda field, value: bounds.check_whole(field, value, 1, 1_000_000))
INSTANT = Limit(bounds.check_instant)
TAG_FILTER = Limit(_check_tags)
TEXT_FILTER = text_limit(bounds.MAX_TITLE)
PRIORITY_FILTER = Limit(lambda field, value: bounds.check_number(field, value, 1, 10))
