"""The OpenAPI document, completed with what every route may answer, and a page that shows it."""

from functools import lru_cache
from html import escape
from typing import Any

from litestar import Litestar

from tenuto.api.auth.route_access import PUBLIC, ROUTES
from tenuto.api.edge.problems import MEDIA_TYPE

MERMAID = "text/vnd.mermaid"
"""How graphs are given as text."""
_PROBLEM = {
    "type": "object",
    "title": "Problem",
    "description": "What went wrong; programs decide by `code`.",
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
def document(app: Litestar) -> dict[str, Any]:
    """The contract: every route, what it takes, and each kind of answer."""
    found: dict[str, Any] = app.openapi_schema.to_schema()
    parts = found.setdefault("components", {})
    parts.setdefault("schemas", {})["Problem"] = _PROBLEM
    parts["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            if isinstance(operation, dict) and "responses" in operation:
                _complete(operation, ROUTES[f"{method.upper()} {path}"] is PUBLIC)
        if path.endswith("/graph"):
            answer = methods["get"]["responses"]["200"]
            answer["content"][MERMAID] = {"schema": {"type": "string"}}
    return found


def _complete(operation: dict[str, Any], public: bool) -> None:
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    responses = operation["responses"]
    responses.pop("400", None)
    responses["4XX"] = {"description": "Refused; `code` says why.", "content": content}
    responses.setdefault("503", {"description": "The store does not answer.", "content": content})
    operation["security"] = [] if public else [{"bearer": []}]


def page(described: dict[str, Any]) -> str:
    """A plain page of all routes, without anything from elsewhere."""
    rows = []
    for path, methods in sorted(described["paths"].items()):
        for method, operation in methods.items():
            said = escape(operation.get("description") or operation.get("summary") or "")
            rows.append(
                f"<tr><td><code>{method.upper()}</code></td><td><code>{escape(path)}</code></td>"
                f"<td>{said}</td></tr>"
            )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tenuto API</title>"
        "<style>body{font:15px system-ui;margin:2rem;max-width:70rem}td{padding:.25rem .75rem;"
        "border-bottom:1px solid #ddd;vertical-align:top}</style>"
        "<h1>Tenuto API</h1><p>The contract is <a href=/openapi.json>openapi.json</a>.</p>"
        f"<table>{''.join(rows)}</table></html>"
    )
