"""Serves the application over HTTP, until asked to stop."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from tenuto import private
from tenuto.api.app import Application
from tenuto.api.edge.connection import Connection, Edge
from tenuto.api.edge.connection_limits import ConnectionTable, Deadlines
from tenuto.api.edge.metrics import watch
from tenuto.api.service import Service
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.errors import Unauthenticated, Unavailable
from tenuto.periodic import run_periodically
from tenuto.settings import Settings

log = logging.getLogger("tenuto.api")

BACKLOG = 2048
FILES_KEPT = 100
"""Open files that connections leave to databases, logs and webhooks."""
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
    deadlines: Deadlines | None = None,
) -> None:
    """Answer requests until `stop`; open streams and long polls end, other requests finish."""
    bound = listen(service.settings)
    port = bound.getsockname()[1]
    edge = _edge(service, deadlines)
    http: Any = partial(Connection, edge)
    config = uvicorn.Config(
        Application(service),
        http=http,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=END_S,
    )
    server = _Server(config)
    await _bootstrap(service)
    watching = await watch(service, stop)
    running = asyncio.create_task(server.serve(sockets=[bound]))
    hub = asyncio.create_task(service.hub.run(stop, service.clock))
    sweeping = asyncio.create_task(
        run_periodically(edge.sweep_once, lambda: edge.deadlines.sweep_s, stop, service.clock)
    )
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
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        bound.close()


def _edge(service: Service, deadlines: Deadlines | None) -> Edge:
    """The bounds of the server's connections, no wider than the limit of open files allows."""
    settings = service.settings
    table: ConnectionTable[Connection] = ConnectionTable(
        _holdable(settings.connections), settings.connections_per_address
    )
    return Edge(service.clock, table, settings.proxy_networks(), deadlines)


def _holdable(wanted: int) -> int:
    """How many connections the process can hold; raises its limit of open files if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    held = max(soft - FILES_KEPT, soft // 2)
    log.warning("%d open files allow %d of the %d connections set", soft, held, wanted)
    return held


async def _bootstrap(service: Service) -> None:
    """Give the first owner a token, in a file that nobody else may read.

    The file is written before the token holds: it is stored nowhere else, and there is no second
    one. Until then it has a name of its own, because servers that start at once may share a folder.
    """
    identity = service.identity
    folder = service.settings.folder()
    path = folder / TOKEN_FILE
    if not await identity.has_no_tokens():
        await _recover_owner_token(service, path)
        return
    made = identity.unsaved_token()
    kept = folder / f"{TOKEN_FILE}.{made.id}"
    await asyncio.to_thread(private.make_folder, folder)
    kept.touch(mode=private.FILE)
    try:
        kept.write_text(made.token + "\n")
    except OSError:
        kept.unlink()
        raise
    if await identity.bootstrap(DEFAULT_WORKSPACE, made):
        _publish_token_file(kept, path)
    else:
        kept.unlink()


async def _recover_owner_token(service: Service, path: Path) -> None:
    """Hand over a first owner's token whose server died between making it hold and saying so."""
    for kept in _unpublished_token_files(path):
        with suppress(Unauthenticated, OSError, ValueError):  # what does not hold is nobody's
            await service.identity.caller(kept.read_text().strip(), None)
            _publish_token_file(kept, path)
            return


def _unpublished_token_files(path: Path) -> list[Path]:
    """Where tokens are of which nobody was told, if nobody was told of any."""
    return [] if path.exists() else [*path.parent.glob(f"{TOKEN_FILE}.*")]


def _publish_token_file(kept: Path, path: Path) -> None:
    with suppress(FileNotFoundError):  # a server that starts beside this one may have done it
        kept.replace(path)
    log.info("the first owner's token is in %s", path)
