"""`RemoteResource`: the base of the objects that call a server; each call sends one request."""

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import UNSET

from tenuto.client.remote.http import ApiRequest, ServerConnection

T = TypeVar("T")

V1 = "/api/v1"


class RemoteResource:
    """Sends the calls of one resource to one server."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection

    async def _call(
        self,
        response_type: type[T],
        method: str,
        path: str,
        body: Any = UNSET,
        *,
        params: Mapping[str, Any] | None = None,
        version: int | None = None,
        once: bool = False,
        repeatable: bool | None = None,
        wait_s: float = 0.0,
    ) -> T:
        """Sends a request for a path below `/api/v1` and returns the decoded response.

        `version`: the server refuses the request if the object has another version.
        `once`: the server executes the request once, even if it is sent again after a lost
        response. `repeatable`: executing it twice is safe; by default only GET and PUT are.
        `wait_s`: additional seconds for the response.
        """
        headers = {}
        if version is not None:
            headers["If-Match"] = f'"{version}"'
        if once:
            headers["Idempotency-Key"] = str(self.connection.clock.new_id())
        if repeatable is None:
            repeatable = once or method in ("GET", "PUT")
        request = ApiRequest(
            method=method,
            path=f"{V1}/{path}",
            body=body,
            params=params or {},
            headers=headers,
            repeatable=repeatable,
            wait_s=wait_s,
        )
        return await self.connection.request(response_type, request)
