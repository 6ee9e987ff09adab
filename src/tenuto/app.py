"""Puts the parts together: the only module that knows every concrete class."""

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tenuto import logs, private, tracing
from tenuto.broker.local import LocalWakeups
from tenuto.broker.memory import MemoryWakeups
from tenuto.broker.protocol import Wakeups
from tenuto.clock import Clock
from tenuto.engine.agents.subtask_tree import SpawnLimits
from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid, Unavailable
from tenuto.settings import Settings, listed
from tenuto.store.protocol import Store
from tenuto.store.schema import NEEDS
from tenuto.store.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from tenuto.api.service import Service
    from tenuto.coordinator.dispatch import Dispatcher
    from tenuto.encryption_keys import KeyRing
    from tenuto.store.postgres.roles import Identity
    from tenuto.worker.session import Supervisor
    from tenuto.worker.worker import Connect, Worker

T = TypeVar("T")
log = logging.getLogger("tenuto")

_GC = (50_000, 20, 50)
_SWITCH_S = 0.0005
_LONGEST_REASON = 300
_HINT_S = 10
PARENT_PIPE = "TENUTO_PARENT_PIPE"
"""Set for a child that must stop when its standard input ends."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, on the fastest event loop that is installed.

    An exit that something on the loop raises, as a task that a handler started may, is a failure of
    whoever waits for it and not the end of the program: others work here, too.
    """
    try:
        _tune()
        with asyncio.Runner(loop_factory=_fastest()) as runner:
            task = runner.get_loop().create_task(main)
            while True:
                try:
                    runner.run(_ended(task))
                except (SystemExit, KeyboardInterrupt) as left:
                    if task.done() or _is_a_persons(left):
                        raise
                    log.exception("something on the event loop raised an exit; the others go on")
                else:
                    return task.result()
    finally:
        main.close()  # interrupted before it began, it would complain


def _tune() -> None:
    """Set the interpreter up for a process that does one thing."""
    # A worker makes many objects that die young and hardly any cycles: look for those less often,
    # and never among what the program was loaded with.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC)
    # A thread that writes to SQLite wants the interpreter only between two statements.
    sys.setswitchinterval(_SWITCH_S)


def _fastest() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the fastest event loop that is installed."""
    try:
        import uvloop  # noqa: PLC0415  optional
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _ended(task: "asyncio.Task[T]") -> None:
    """Over when the task is; asked to end, it ends the task, which may have the last word."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            raise


def _is_a_persons(left: BaseException) -> bool:
    """Whether somebody may have pressed Ctrl-C; where a program listens to it nothing is raised."""
    listens = signal.getsignal(signal.SIGINT)
    listened_to = callable(listens) and listens is not signal.default_int_handler
    return isinstance(left, KeyboardInterrupt) and not listened_to


def process_name(clock: Clock) -> str:
    """`{host}:{pid}:{uuid}`: this process among all."""
    return f"{socket.gethostname()}:{os.getpid()}:{clock.new_id()}"


def shown(url: str) -> str:
    """The address without its password."""
    return logs.without_password(url)


def sqlite_path(url: str) -> str | None:
    """The file of a SQLite address, `None` for another kind of database.

    `sqlite:///t.db` is relative to here, `sqlite:////var/t.db` absolute.
    """
    if not url.startswith("sqlite:"):
        return None
    path = url.removeprefix("sqlite:///")
    if path == url or not path.strip("/"):
        raise Invalid(f"{url!r} names no file; use sqlite:///path", "database_invalid")
    return path


def configured_store(settings: Settings, *, many: bool = False) -> Store:
    """The settings' store; nothing is connected yet. `many`: it will serve many tenants."""
    if not settings.pooler:
        return open_store(settings.url(), many=many)
    from tenuto.store.postgres.pooler import Pooler  # noqa: PLC0415  asyncpg only when used
    from tenuto.store.postgres.store import PostgresStore  # noqa: PLC0415

    pooler = Pooler(settings.database_runtime, settings.database_direct)
    return PostgresStore(settings.url(), pooler=pooler)


def open_store(url: str, *, many: bool = False) -> Store:
    """The same for an address, where no pooler is in between."""
    path = sqlite_path(url)
    if path is not None:
        if path != ":memory:":
            try:
                private.make_folder(Path(path).parent)
            except OSError as error:
                raise Unavailable(f"cannot make a folder for {path}: {error}") from error
        return SqliteStore(path)
    if url.startswith(("postgresql://", "postgres://")):
        from tenuto.store.postgres.store import PostgresStore  # noqa: PLC0415  asyncpg only when used

        return PostgresStore(url, many=many)
    raise Invalid(
        f"{shown(url)!r} is not a database address; use sqlite:///path or postgresql://...",
        "database_invalid",
    )


async def identities(engine: Engine) -> "dict[str, Identity]":
    """Who the engine's connections act as, by whose they are; empty where there are no roles."""
    if isinstance(engine.store, SqliteStore):
        return {}
    from tenuto.store.postgres.store import PostgresStore  # noqa: PLC0415  asyncpg only when used

    stores = {"system": engine.store, "tenants": engine.core.store}
    return {
        name: await store.identity()
        for name, store in stores.items()
        if isinstance(store, PostgresStore)
    }


def open_wakeups(url: str, store: Store, name: str, *, listen: bool) -> Wakeups:
    """The hints that go with a store."""
    path = sqlite_path(url)
    if path == ":memory:":
        return MemoryWakeups()
    if path is not None:
        return LocalWakeups(path, name[-20:], store.clock)
    from tenuto.broker.postgres import PostgresWakeups  # noqa: PLC0415  asyncpg only when used
    from tenuto.store.postgres.sessions import DIRECT  # noqa: PLC0415
    from tenuto.store.postgres.store import PostgresStore  # noqa: PLC0415

    assert isinstance(store, PostgresStore)
    if (direct := store.direct) is None:
        return MemoryWakeups()
    wakeups = PostgresWakeups(
        lambda: direct.connect(DIRECT, command_timeout=_HINT_S), store.clock, listen=listen
    )
    direct.when_given_up(wakeups.reconnect)
    return wakeups


@asynccontextmanager
async def opened(
    settings: Settings, *, listen: bool = False, many: bool = False
) -> AsyncIterator[tuple[Store, Wakeups]]:
    """The settings' store and its hints. An embedded database is made and migrated by itself."""
    url = settings.url()
    store = configured_store(settings, many=many)
    try:
        if isinstance(store, SqliteStore) and (await store.schema()).schema < NEEDS:
            await store.migrate()
        await store.open()
        wakeups = open_wakeups(url, store, process_name(store.clock), listen=listen)
        if listen:
            await wakeups.open()
        try:
            yield store, wakeups
        finally:
            await wakeups.close()
    finally:
        await store.close()


@asynccontextmanager
async def connect(
    settings: Settings, *, actor: str | None = None, listen: bool = False
) -> AsyncIterator[Engine]:
    """An engine on the settings' database."""
    async with opened(settings, listen=listen) as (store, wakeups):
        vault = cache(lambda: open_vault(settings))
        engine = Engine(store, wakeups, actor=actor, vault=vault)
        engine.core.tree = SpawnLimits(settings.max_depth, settings.max_children)
        engine.core.transcript_kb = settings.transcript_kb
        engine.core.lanes.ceiling = settings.ceiling()
        engine.system.lanes.ceiling = settings.ceiling()
        yield engine


def open_vault(settings: Settings) -> "KeyRing":
    """The keys that seal secrets: the settings', or a file in the data folder."""
    from tenuto.encryption_keys import load_ring  # noqa: PLC0415  not for every command

    return load_ring(key_folder(settings), settings.keys or None)


def key_folder(settings: Settings) -> Path:
    """Where the file of keys is: beside an embedded database, else in the data folder."""
    path = sqlite_path(settings.url())
    return settings.folder() if path in (None, ":memory:") else Path(path or "").parent


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker process was asked to work."""

    agent: str = "local"
    slots: int | None = None
    accept_commands: bool = True
    task_tags: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    agent_type: str | None = None
    command: tuple[str, ...] | None = None
    app: str | None = None
    metrics_port: int | None = None


def _tell(role: str, settings: Settings, metrics_port: int | None = None) -> None:
    """Set up what a program that runs until it is stopped tells of itself."""
    logs.set_up(style=settings.log)
    tracing.set_up(role, wanted=settings.otel)
    if metrics_port is not None:
        _tell_metrics(settings.host, metrics_port)


def _tell_metrics(host: str, port: int) -> None:
    """Answer Prometheus where no API does; `Unavailable` when somebody else has the port."""
    from prometheus_client import start_http_server  # noqa: PLC0415  not for every command

    from tenuto.metrics import PROCESS_METRICS  # noqa: PLC0415

    try:
        start_http_server(port, host, PROCESS_METRICS.registry)
    except OSError as error:
        raise Unavailable(
            f"cannot tell metrics on {host}:{port}: {error.strerror or error}", "port_taken"
        ) from error


def serve_worker(settings: Settings, options: WorkerOptions, reach: "Connect | None" = None) -> int:
    """Work until asked to stop, for the engine that `reach` gives if it is elsewhere."""
    _tell("worker", settings, options.metrics_port)
    return run(_worker(settings, options, reach))


def serve_coordinator(settings: Settings, metrics_port: int | None = None) -> int:
    """Coordinate until asked to stop; the exit code."""
    _tell("coordinator", settings, metrics_port)
    return run(_coordinator(settings))


def serve_api(settings: Settings) -> int:
    """Answer requests until asked to stop; the exit code."""
    _tell("api", settings)
    return run(_api(settings))


def serve_up(settings: Settings, workers: int) -> int:
    """Coordinator here and workers as child processes, until asked to stop; the exit code."""
    _tell("up", settings)
    return run(_up(settings, workers))


def stop_on_signals(tell: Callable[[], None] = lambda: None) -> asyncio.Event:
    """An event that SIGTERM, SIGINT, or the end of a supervising parent sets.

    Of a signal `tell` hears at once, even while the event loop is kept busy.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard(_number: int, _frame: object) -> None:
        loop.call_soon_threadsafe(stop.set)
        tell()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, heard)
    if os.environ.get(PARENT_PIPE):
        # Standard input is a pipe that only the parent holds: its end is the parent's end.
        def read() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)  # an ended pipe stays readable: one look is enough
                stop.set()

        loop.add_reader(0, read)
    return stop


async def _worker(
    settings: Settings, options: WorkerOptions, reach: "Connect | None" = None
) -> int:
    from tenuto.worker.session import Supervisor  # noqa: PLC0415  not for every command
    from tenuto.worker.worker import Worker  # noqa: PLC0415

    if options.slots is not None:
        settings = msgspec.structs.replace(settings, slots=options.slots)
    worker: Worker | None = None

    def end_soon() -> None:
        if worker is not None:
            worker.request_drain()

    stop = stop_on_signals(end_soon)
    async with reach() if reach is not None else connect(settings, listen=True) as engine:
        worker = Worker(engine, settings, connect=reach or (lambda: connect(settings)))
        engine.actor = worker.id
        supervisor = Supervisor()
        try:
            await _host(worker, supervisor, options)
            log.info("worker %s hosts %s", worker.id, options.agent)
            await worker.run(stop)
        finally:
            await supervisor.close()
    return 0


async def _host(worker: "Worker", supervisor: "Supervisor", options: WorkerOptions) -> None:
    from tenuto.worker.runtime.command import CommandRuntime  # noqa: PLC0415  not for every command
    from tenuto.worker.runtime.environment import allowed_by  # noqa: PLC0415

    if options.app is not None:
        await _host_app(worker, options)
        return
    profile = AgentProfile(
        id=worker.engine.clock.new_id(),
        workspace=worker.engine.workspace,
        name=options.agent,
        agent_type=options.agent_type,
        task_tags=options.task_tags,
        capabilities=options.capabilities,
        runtimes=("command",) if options.command else (),
        accept_commands=options.accept_commands,
    )
    runtime = CommandRuntime(supervisor, options.command, allowed_by(worker.settings))
    await worker.host(profile, runtime)


async def _host_app(worker: "Worker", options: WorkerOptions) -> None:
    """Host the handlers that a user's module names: `module:attribute`, a dict by task type."""
    assert options.app is not None
    handlers = _loaded(options.app)
    by_type = isinstance(handlers, dict) and all(
        each is None or isinstance(each, str) for each in handlers
    )
    if not by_type or not all(callable(each) for each in handlers.values()):
        raise Invalid(f"{options.app} is not a dict of handlers by task type")
    await worker.host_functions(
        options.agent,
        handlers,
        task_tags=options.task_tags,
        capabilities=options.capabilities,
        agent_type=options.agent_type,
    )


def _loaded(name: str) -> Any:
    """What `module:attribute` names; `Invalid` whatever the module does when it is loaded."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute or "handlers")
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise Invalid(f"cannot load {name!r}: {why[:_LONGEST_REASON]}") from error


@asynccontextmanager
async def service(settings: Settings) -> AsyncIterator["Service"]:
    """What an API serves from, opened."""
    from tenuto.api.service import Service  # noqa: PLC0415  not for every command
    from tenuto.webhooks.url_guard import UrlGuard  # noqa: PLC0415

    async with opened(settings, listen=True, many=True) as (store, wakeups):
        guard = UrlGuard(listed(settings.webhook_allow))
        yield Service(store, wakeups, open_vault(settings), settings, guard.look_up)


async def _api(settings: Settings) -> int:
    from tenuto.api.server import serve  # noqa: PLC0415  not for every command

    stop = stop_on_signals()
    async with service(settings) as served:
        await serve(served, stop)
    return 0


async def _coordinator(settings: Settings) -> int:
    stop = stop_on_signals()
    async with connect(settings, listen=bool(settings.gateways)) as engine:
        await _coordinate(engine, settings, stop)
    return 0


async def _coordinate(engine: Engine, settings: Settings, stop: asyncio.Event) -> None:
    """All that belongs to no tenant: the coordinator's duties, and what webhooks are to be told."""
    from tenuto.coordinator.coordinator import Coordinator  # noqa: PLC0415  not for every command
    from tenuto.engine.webhooks.deliveries import Deliveries  # noqa: PLC0415
    from tenuto.webhooks.deliver import Deliverer  # noqa: PLC0415
    from tenuto.webhooks.sender import Sender  # noqa: PLC0415
    from tenuto.webhooks.url_guard import UrlGuard  # noqa: PLC0415

    name = process_name(engine.clock)
    engine.actor = name
    log.info("coordinator %s", name)
    sender = Sender(UrlGuard(listed(settings.webhook_allow)), settings.webhook_timeout_s)
    deliverer = Deliverer(Deliveries(engine.system), sender, settings.tick_s)
    duties = [Coordinator(engine, settings, name=name).run(stop), deliverer.run(stop)]
    if settings.gateways:
        duties.append(_dispatcher(engine, settings, name).run(stop))
    await asyncio.gather(*duties)


def _dispatcher(engine: Engine, settings: Settings, name: str) -> "Dispatcher":
    """What pushes tasks to gateways while this coordinator leads."""
    from tenuto.api.auth.attempt_tokens import AttemptTokens  # noqa: PLC0415  not for every command
    from tenuto.coordinator.coordinator import NAME  # noqa: PLC0415
    from tenuto.coordinator.dispatch import DEADLINE, Dispatcher, DispatcherConfig  # noqa: PLC0415
    from tenuto.coordinator.gateway import Gateway  # noqa: PLC0415
    from tenuto.engine.agents.push import PushSessions  # noqa: PLC0415

    tokens = AttemptTokens(open_vault(settings), engine.clock)

    async def leads() -> bool:
        if not settings.leader:
            return True
        leader = await engine.upkeep.leader(NAME)
        return leader is not None and leader.holder == name and leader.until > engine.clock.now()

    deadline_s = DEADLINE * settings.spawn_timeout_s
    means = DispatcherConfig(
        gateways={
            each: Gateway(each, url, settings.gateway_token, deadline_s=deadline_s)
            for each, url in settings.gateway_urls().items()
        },
        issue=lambda agent, workspace, fence: tokens.issue(agent, workspace, fence)[0],
        leads=leads,
        actor=name,
    )
    return Dispatcher(PushSessions(engine.system), means, settings)


async def _up(settings: Settings, workers: int) -> int:
    from tenuto.api.server import serve  # noqa: PLC0415  not for every command
    from tenuto.worker.process_pool import WorkerPool  # noqa: PLC0415

    stop = stop_on_signals()
    listen = bool(settings.gateways)
    async with connect(settings, listen=listen) as engine, service(settings) as served:
        children = WorkerPool(engine, settings, workers)
        log.info("up on %s with %d worker(s); Ctrl-C drains", shown(settings.url()), workers)
        await asyncio.gather(
            _coordinate(engine, settings, stop), children.run(stop), serve(served, stop)
        )
    return 0
