"""Serves the application over HTTP until a stop event is set."""

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
from tenuto.api.edge.metrics import start_metrics
from tenuto.api.service import Service
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.errors import Unauthenticated, Unavailable
from tenuto.periodic import run_periodically
from tenuto.settings import Settings

log = logging.getLogger("tenuto.api")

LISTEN_BACKLOG = 2048
RESERVED_FILES = 100
"""File descriptors reserved for databases, logs and webhooks; the rest may be connections."""
SHUTDOWN_S = 5
"""Seconds that open requests have to finish after the stop."""
TOKEN_FILE = "token"  # noqa: S105  a file name


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers: the program handles signals and sets an event."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers."""
        yield


def listen(settings: Settings) -> socket.socket:
    """Returns a listening socket; raises `Unavailable` (`port_taken`) if the port is in use."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With IPPROTO_TCP the event loop turns Nagle's algorithm off, which costs 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
            "port_taken",
        ) from error
    listener.listen(LISTEN_BACKLOG)
    return listener


async def serve(
    service: Service,
    stop: asyncio.Event,
    ready: Callable[[str], None] | None = None,
    deadlines: Deadlines | None = None,
) -> None:
    """Serves requests until `stop` is set; then ends streams and long polls, and finishes the rest.

    `ready` is called with the URL once the server runs. Raises `Unavailable` if the port is in use.
    In a new database, creates the first owner's token.
    """
    listener = listen(service.settings)
    port = listener.getsockname()[1]
    edge = _build_edge(service, deadlines)
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
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Server(config)
    await _bootstrap_owner_token(service)
    metrics_task = await start_metrics(service, stop)
    server_task = asyncio.create_task(server.serve(sockets=[listener]))
    hub_task = asyncio.create_task(service.hub.run(stop, service.clock))
    sweep_task = asyncio.create_task(
        run_periodically(edge.sweep_once, lambda: edge.deadlines.sweep_s, stop, service.clock)
    )
    stop_task = asyncio.create_task(stop.wait())
    url = f"http://{service.settings.host}:{port}"
    log.info("API on %s", url)
    if ready is not None:
        ready(url)
    try:
        await asyncio.wait([server_task, stop_task], return_when=asyncio.FIRST_COMPLETED)
    finally:
        service.stopping.set()
        service.hub.wake_all()
        server.should_exit = True
        stop_task.cancel()
        await asyncio.gather(server_task, hub_task, metrics_task)
        sweep_task.cancel()
        await asyncio.gather(sweep_task, return_exceptions=True)
        listener.close()


def _build_edge(service: Service, deadlines: Deadlines | None) -> Edge:
    """Returns the state that connections share, limited by settings and the open file limit."""
    settings = service.settings
    table: ConnectionTable[Connection] = ConnectionTable(
        _max_connections(settings.connections), settings.connections_per_address
    )
    return Edge(service.clock, table, settings.proxy_networks(), deadlines)


def _max_connections(configured: int) -> int:
    """If needed, raises the open file limit; returns how many of `configured` connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = configured + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return configured
    allowed = max(soft - RESERVED_FILES, soft // 2)
    log.warning(
        "the limit of %d open files allows %d of the %d connections in the settings",
        soft,
        allowed,
        configured,
    )
    return allowed


async def _bootstrap_owner_token(service: Service) -> None:
    """Creates the first owner's token in a private file, or recovers the file after a crash.

    The file is written before the token becomes valid, because the token is stored nowhere else
    and is created only once. Until then the file has a unique name, because servers that start at
    the same time may share a folder.
    """
    identity = service.identity
    folder = service.settings.data_folder()
    path = folder / TOKEN_FILE
    if not await identity.has_no_tokens():
        await _recover_owner_token(service, path)
        return
    owner_token = identity.new_token()
    unpublished = folder / f"{TOKEN_FILE}.{owner_token.id}"
    await asyncio.to_thread(private.make_folder, folder)
    unpublished.touch(mode=private.FILE_MODE)
    try:
        unpublished.write_text(owner_token.token + "\n")
    except OSError:
        unpublished.unlink()
        raise
    if await identity.bootstrap(DEFAULT_WORKSPACE, owner_token):
        _publish_token_file(unpublished, path)
    else:
        unpublished.unlink()


async def _recover_owner_token(service: Service, path: Path) -> None:
    """Publishes the valid owner token file that a crashed server left behind, if there is one.

    That server crashed after the token became valid and before it renamed the file.
    """
    for unpublished in _unpublished_token_files(path):
        with suppress(Unauthenticated, OSError, ValueError):  # not valid: not the owner's token
            await service.identity.authenticate(unpublished.read_text().strip(), None)
            _publish_token_file(unpublished, path)
            return


def _unpublished_token_files(path: Path) -> list[Path]:
    """Returns the token files with unique names; none if a token file was published."""
    return [] if path.exists() else [*path.parent.glob(f"{TOKEN_FILE}.*")]


def _publish_token_file(unpublished: Path, path: Path) -> None:
    """Renames the token file to its final name and logs where it is."""
    with suppress(FileNotFoundError):  # another starting server may have renamed it
        unpublished.replace(path)
    log.info("the first owner's token is in %s", path)
