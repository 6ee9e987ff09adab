"""The OpenAPI document, with the responses that all routes share, and a page that shows it."""

from functools import lru_cache
from html import escape
from typing import Any

from litestar import Litestar

from tenuto.api.edge.problems import MEDIA_TYPE
from tenuto.api.operation import OPERATIONS, PUBLIC

MERMAID = "text/vnd.mermaid"
"""Media type of graphs as text."""
_PROBLEM = {
    "type": "object",
    "title": "Problem",
    "description": "An error. Programs should branch on `code`.",
    "required": ["title", "status", "code", "detail"],
    "properties": {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string"},
        "detail": {"type": "string"},
        "field": {"type": "string"},
        "type": {"type": "string"},
    },
}


@lru_cache(maxsize=4)
def openapi_document(app: Litestar) -> dict[str, Any]:
    """Returns the (cached) document of the routes, with parameters, body and responses of each."""
    schema: dict[str, Any] = app.openapi_schema.to_schema()
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = _PROBLEM
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            if isinstance(operation, dict) and "responses" in operation:
                access = OPERATIONS[f"{method.upper()} {path}"].access
                _add_common_responses(operation, access is PUBLIC)
        if path.endswith("/graph"):
            response = methods["get"]["responses"]["200"]
            response["content"][MERMAID] = {"schema": {"type": "string"}}
    return schema


def _add_common_responses(operation: dict[str, Any], is_public: bool) -> None:
    """Adds error responses, in place of 400, and the security requirement to one operation."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    responses = operation["responses"]
    responses.pop("400", None)
    responses["4XX"] = {"description": "Refused; `code` is the reason.", "content": content}
    responses.setdefault("503", {"description": "The store is unavailable.", "content": content})
    operation["security"] = [] if is_public else [{"bearer": []}]


def docs_page(document: dict[str, Any]) -> str:
    """Returns an HTML page of the document's routes; it loads nothing from other servers."""
    rows = []
    for path, methods in sorted(document["paths"].items()):
        for method, operation in methods.items():
            description = escape(operation.get("description") or operation.get("summary") or "")
            rows.append(
                f"<tr><td><code>{method.upper()}</code></td><td><code>{escape(path)}</code></td>"
                f"<td>{description}</td></tr>"
            )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tenuto API</title>"
        "<style>body{font:15px system-ui;margin:2rem;max-width:70rem}td{padding:.25rem .75rem;"
        "border-bottom:1px solid #ddd;vertical-align:top}</style>"
        "<h1>Tenuto API</h1><p>The contract is <a href=/openapi.json>openapi.json</a>.</p>"
        f"<table>{''.join(rows)}</table></html>"
    )
