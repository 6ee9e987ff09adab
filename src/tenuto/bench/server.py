"""An API server process with an additional route that parses a task and returns the same JSON.

`python -m tenuto.bench.server FOLDER DATABASE` prints its address and a token, and serves until its
standard input ends.
"""

import asyncio
import sys
from datetime import UTC, datetime
from uuid import UUID

import msgspec
from litestar.params import JSONBody

from tenuto import app
from tenuto.api import server as api_server
from tenuto.api.operation import PUBLIC, operation
from tenuto.api.routes.task_bodies import TaskBody
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.engine.views import TaskView, new_task_view
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings

ECHO = "/bench/echo"
_AT = datetime(2030, 1, 1, tzinfo=UTC)


async def echo(data: JSONBody[TaskBody]) -> TaskView:
    """Returns the response of a submit without submitting."""
    return new_task_view(data.new_task(), UUID(int=1), _AT, DEFAULT_WORKSPACE, "bench")


def add_echo() -> None:
    """Adds the echo route to the API of this process."""
    operation("POST", ECHO, PUBLIC, prefix="")(echo)


async def main(folder: str, database: str) -> None:
    """Prints address and token, then serves the API and `ECHO` until standard input ends."""
    add_echo()
    settings = Settings(
        database=database,
        data=folder,
        port=0,
        rate_per_s=0,
        streams_per_token=2000,
        streams_per_workspace=2000,
        connections=3000,
        connections_per_address=3000,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: stop.set())
    async with app.open_service(settings) as service:
        token = await service.identity.create_token(DEFAULT_WORKSPACE, "bench", Role.OWNER)

        def ready(url: str) -> None:
            print(msgspec.json.encode({"url": url, "token": token.token}).decode(), flush=True)

        await api_server.serve(service, stop, ready)


if __name__ == "__main__":
    app.run(main(*sys.argv[1:]))
