"""Serves the application over HTTP, until asked to stop."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from litestar import Litestar

from tenuto.api.app import make_app
from tenuto.api.metrics import watch
from tenuto.api.service import Service
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.errors import Unavailable
from tenuto.settings import Settings

log = logging.getLogger("tenuto.api")

BACKLOG = 2048
END_S = 5
"""Seconds that open requests have to end."""
TOKEN_FILE = "token"  # noqa: S105  a file's name


class _Server(uvicorn.Server):
    """A server whose end is asked for by an event; signals are the program's business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def listen(settings: Settings) -> socket.socket:
    """The bound socket; `Unavailable` when somebody else has the port."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Named as TCP, or the event loop would leave Nagle's algorithm on: 40 ms a request.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        raise Unavailable(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
            "port_taken",
        ) from error
    bound.listen(BACKLOG)
    return bound


async def serve(
    service: Service,
    stop: asyncio.Event,
    ready: Callable[[str], None] | None = None,
    make: Callable[[Service], Litestar] = make_app,
) -> None:
    """Answer requests until `stop`; open streams and long polls end, other requests finish."""
    bound = listen(service.settings)
    port = bound.getsockname()[1]
    config = uvicorn.Config(
        make(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=END_S,
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = _Server(config)
    await _bootstrap(service)
    watching = await watch(service, stop)
    running = asyncio.create_task(server.serve(sockets=[bound]))
    hub = asyncio.create_task(service.hub.run(stop, service.clock))
    stopped = asyncio.create_task(stop.wait())
    url = f"http://{service.settings.host}:{port}"
    log.info("API on %s", url)
    if ready is not None:
        ready(url)
    try:
        await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        service.stopping.set()
        service.hub.wake()
        server.should_exit = True
        stopped.cancel()
        await asyncio.gather(running, hub, watching)
        bound.close()


async def _bootstrap(service: Service) -> None:
    """Give the first owner a token, in a file that nobody else may read.

    The file is written before the token holds: it is stored nowhere else, and there is no second
    one. Until then it has a name of its own, because servers that start at once may share a folder.
    """
    identity = service.identity
    if not await identity.unowned():
        return
    made = identity.fresh()
    folder = service.settings.folder()
    path = folder / TOKEN_FILE
    kept = folder / f"{TOKEN_FILE}.{made.id}"
    await asyncio.to_thread(folder.mkdir, 0o700, True, True)
    kept.touch(mode=0o600)
    kept.write_text(made.token + "\n")
    if await identity.bootstrap(DEFAULT_WORKSPACE, made):
        kept.replace(path)
        log.info("the first owner's token is in %s", path)
    else:
        kept.unlink()
