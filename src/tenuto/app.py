"""Builds the programs from their parts and runs them: worker, coordinator, API and `up`.

The only module that imports every concrete class.
"""

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
from tenuto.broker.protocol import BrokerContext, Wakeups
from tenuto.clock import Clock
from tenuto.engine.agents.subtask_tree import SpawnLimits
from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid, Unavailable
from tenuto.registry import BROKERS, GATEWAYS, RUNTIMES, STORES, scheme_of
from tenuto.settings import Settings, split_commas, sqlite_path
from tenuto.store.protocol import Store
from tenuto.store.schema import REQUIRED_SCHEMA
from tenuto.store.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from tenuto.api.service import Service
    from tenuto.coordinator.dispatch import Dispatcher
    from tenuto.encryption_keys import KeyRing
    from tenuto.store.postgres.roles import Identity
    from tenuto.worker.runtime.protocol import Handler
    from tenuto.worker.session import Supervisor
    from tenuto.worker.worker import Connect, Worker

T = TypeVar("T")
log = logging.getLogger("tenuto")

_GC_THRESHOLDS = (50_000, 20, 50)
_SWITCH_INTERVAL_S = 0.0005
_MAX_REASON_CHARS = 300
PARENT_PIPE = "TENUTO_PARENT_PIPE"
"""Environment variable of a child process that must stop when its standard input ends."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Tunes the interpreter; runs the coroutine on the fastest installed loop; returns its result.

    If another task on the loop raises an exit, for example a task that a handler started, only the
    code that waits for that task fails. The program goes on, because other tasks run here, too.
    """
    try:
        _tune_interpreter()
        with asyncio.Runner(loop_factory=_fastest_loop_factory()) as runner:
            task = runner.get_loop().create_task(main)
            while True:
                try:
                    runner.run(_wait_until_done(task))
                except (SystemExit, KeyboardInterrupt) as error:
                    if task.done() or _is_ctrl_c(error):
                        raise
                    log.exception("a task on the event loop raised an exit; others continue")
                else:
                    return task.result()
    finally:
        main.close()  # a coroutine that never started would warn


def _tune_interpreter() -> None:
    """Makes the process collect garbage less often and switch between threads more often."""
    # A worker creates many short-lived objects and hardly any reference cycles: search for cycles
    # less often, and never among the objects that were loaded with the program.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    # A thread that writes to SQLite needs the interpreter only between two statements.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _fastest_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns a factory of uvloop event loops, or `None` if uvloop is not installed."""
    try:
        import uvloop  # noqa: PLC0415  optional
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _wait_until_done(task: "asyncio.Task[T]") -> None:
    """Waits for the task; if cancelled, cancels it, and raises only if it then ends cancelled."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            raise


def _is_ctrl_c(error: BaseException) -> bool:
    """True for a `KeyboardInterrupt`, unless the program has its own handler of SIGINT.

    A program with its own handler of SIGINT gets no exception from Ctrl-C.
    """
    handler = signal.getsignal(signal.SIGINT)
    has_own_handler = callable(handler) and handler is not signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and not has_own_handler


def process_name(clock: Clock) -> str:
    """Returns a new `{host}:{pid}:{uuid}`, which is unique among all processes."""
    return f"{socket.gethostname()}:{os.getpid()}:{clock.new_id()}"


def display_url(url: str) -> str:
    """Returns the URL with its password masked."""
    return logs.without_password(url)


def create_configured_store(settings: Settings, *, many_tenants: bool = False) -> Store:
    """Creates the settings' store, not yet connected. `many_tenants`: they share connections."""
    if not settings.pooler:
        return create_store(settings.database_url(), many_tenants=many_tenants)
    from tenuto.store.postgres.pooler import Pooler  # noqa: PLC0415  asyncpg only when used
    from tenuto.store.postgres.store import PostgresStore  # noqa: PLC0415

    pooler = Pooler(settings.database_runtime, settings.database_direct)
    return PostgresStore(settings.database_url(), pooler=pooler)


def create_store(url: str, *, many_tenants: bool = False) -> Store:
    """Creates the store of a URL, not connected and without a pooler; `Invalid` if none fits."""
    if scheme_of(url) not in STORES:
        raise _database_invalid_error(url)
    store: Store = STORES.load(scheme_of(url))(url, many_tenants=many_tenants)
    return store


def _database_invalid_error(url: str) -> Invalid:
    return Invalid(
        f"{display_url(url)!r} is not a database address; use sqlite:///path or postgresql://...",
        "database_invalid",
    )


def create_sqlite_store(url: str, *, many_tenants: bool = False) -> Store:
    """Creates a SQLite file's store, and its folder if missing; raises `Invalid`, `Unavailable`."""
    del many_tenants
    path = sqlite_path(url)
    if path is None:
        raise _database_invalid_error(url)
    if path != ":memory:":
        try:
            private.make_folder(Path(path).parent)
        except OSError as error:
            raise Unavailable(f"cannot create the folder of {path}: {error}") from error
    return SqliteStore(path)


def create_postgres_store(url: str, *, many_tenants: bool = False) -> Store:
    """Creates the store of a PostgreSQL database; with `many_tenants` they share connections."""
    from tenuto.store.postgres.store import PostgresStore  # noqa: PLC0415  asyncpg only when used

    if not url.startswith(("postgresql://", "postgres://")):
        raise _database_invalid_error(url)
    return PostgresStore(url, share_connections=many_tenants)


async def connection_identities(engine: Engine) -> "dict[str, Identity]":
    """Returns the database roles of the engine's "system" and "tenants"; empty for SQLite."""
    if isinstance(engine.store, SqliteStore):
        return {}
    from tenuto.store.postgres.store import PostgresStore  # noqa: PLC0415  asyncpg only when used

    stores = {"system": engine.store, "tenants": engine.core.store}
    return {
        name: await store.identity()
        for name, store in stores.items()
        if isinstance(store, PostgresStore)
    }


def create_wakeups(url: str, store: Store, name: str, *, listen: bool) -> Wakeups:
    """Creates the broker for the URL's scheme, not yet open; raises `Invalid` if unknown."""
    context = BrokerContext(url=url, name=name, clock=store.clock, store=store, listen=listen)
    wakeups: Wakeups = BROKERS.load(scheme_of(url))(context)
    return wakeups


@asynccontextmanager
async def open_store_and_hints(
    settings: Settings, *, listen: bool = False, many_tenants: bool = False
) -> AsyncIterator[tuple[Store, Wakeups]]:
    """Opens the store and hints for the block; first creates or migrates an embedded database."""
    url = settings.broker or settings.database_url()
    store = create_configured_store(settings, many_tenants=many_tenants)
    try:
        if isinstance(store, SqliteStore) and (await store.schema()).schema < REQUIRED_SCHEMA:
            await store.migrate()
        await store.open()
        wakeups = create_wakeups(url, store, process_name(store.clock), listen=listen)
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
    """Opens an engine on the settings' database for the block. `listen`: it also receives hints."""
    async with open_store_and_hints(settings, listen=listen) as (store, wakeups):
        key_ring = cache(lambda: open_key_ring(settings))
        engine = Engine(store, wakeups, actor=actor, key_ring=key_ring)
        engine.core.spawn_limits = SpawnLimits(settings.max_depth, settings.max_children)
        engine.core.transcript_kb = settings.transcript_kb
        engine.core.lanes.ceiling = settings.quota_ceiling()
        engine.system.lanes.ceiling = settings.quota_ceiling()
        yield engine


def open_key_ring(settings: Settings) -> "KeyRing":
    """Loads the keys of the setting `keys`, else those of the key file; creates a missing file."""
    from tenuto.encryption_keys import load_ring  # noqa: PLC0415  not for every command

    return load_ring(key_folder(settings), settings.keys or None)


def key_folder(settings: Settings) -> Path:
    """Returns the folder of the key file: that of an embedded database, else the data folder."""
    path = sqlite_path(settings.database_url())
    return settings.data_folder() if path in (None, ":memory:") else Path(path or "").parent


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options of a worker process."""

    agent: str = "local"
    slots: int | None = None
    accept_commands: bool = True
    task_tags: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    agent_type: str | None = None
    command: tuple[str, ...] | None = None
    app: str | None = None
    runtime: str | None = None
    metrics_port: int | None = None


def _set_up_logs_and_metrics(
    role: str, settings: Settings, metrics_port: int | None = None
) -> None:
    """Sets up the logs, traces and, if a port is given, the metrics endpoint of this process."""
    logs.set_up(style=settings.log)
    tracing.set_up(role, enabled=settings.otel)
    if metrics_port is not None:
        _serve_metrics(settings.host, metrics_port)


def _serve_metrics(host: str, port: int) -> None:
    """Starts to serve metrics for a process without an API; `Unavailable` if the port is taken."""
    from prometheus_client import start_http_server  # noqa: PLC0415  not for every command

    from tenuto.metrics import PROCESS_METRICS  # noqa: PLC0415

    try:
        start_http_server(port, host, PROCESS_METRICS.registry)
    except OSError as error:
        raise Unavailable(
            f"cannot serve metrics on {host}:{port}: {error.strerror or error}", "port_taken"
        ) from error


def serve_worker(
    settings: Settings, options: WorkerOptions, connect_remote: "Connect | None" = None
) -> int:
    """Runs a worker until it is asked to stop; returns the exit code.

    `connect_remote` connects to the engine of a server; the default is the settings' database.
    """
    _set_up_logs_and_metrics("worker", settings, options.metrics_port)
    return run(_run_worker(settings, options, connect_remote))


def serve_coordinator(settings: Settings, metrics_port: int | None = None) -> int:
    """Runs coordinator, webhook deliveries and pushes until a stop; returns the exit code."""
    _set_up_logs_and_metrics("coordinator", settings, metrics_port)
    return run(_run_coordinator(settings))


def serve_api(settings: Settings) -> int:
    """Serves the API until it is asked to stop and returns the exit code."""
    _set_up_logs_and_metrics("api", settings)
    return run(_run_api(settings))


def serve_up(settings: Settings, workers: int) -> int:
    """Runs coordinator and API, and workers as children, until a stop; returns the exit code."""
    _set_up_logs_and_metrics("up", settings)
    return run(_run_up(settings, workers))


def stop_on_signals(on_signal: Callable[[], None] = lambda: None) -> asyncio.Event:
    """Returns an event that SIGTERM, SIGINT, or the exit of a supervising parent process sets.

    A signal also calls `on_signal` at once, even while the event loop is busy.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle_signal(_number: int, _frame: object) -> None:
        loop.call_soon_threadsafe(stop.set)
        on_signal()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handle_signal)
    if os.environ.get(PARENT_PIPE):
        # Standard input is a pipe that only the parent holds open: it ends when the parent exits.
        def on_readable() -> None:
            """Sets `stop` if standard input has ended; ignores what it contains."""
            if not os.read(0, 4096):
                loop.remove_reader(0)  # an ended pipe stays readable: once is enough
                stop.set()

        loop.add_reader(0, on_readable)
    return stop


async def _run_worker(
    settings: Settings, options: WorkerOptions, connect_remote: "Connect | None" = None
) -> int:
    """Runs a worker with one agent until it is asked to stop; returns the exit code."""
    from tenuto.worker.session import Supervisor  # noqa: PLC0415  not for every command
    from tenuto.worker.worker import Worker  # noqa: PLC0415

    if options.slots is not None:
        settings = msgspec.structs.replace(settings, slots=options.slots)
    worker: Worker | None = None

    def request_drain() -> None:
        if worker is not None:
            worker.request_drain()

    stop = stop_on_signals(request_drain)
    async with (
        connect_remote() if connect_remote is not None else connect(settings, listen=True) as engine
    ):
        worker = Worker(engine, settings, connect=connect_remote or (lambda: connect(settings)))
        engine.actor = worker.id
        supervisor = Supervisor()
        try:
            await _host_agent(worker, supervisor, options)
            log.info("worker %s hosts %s", worker.id, options.agent)
            await worker.run(stop)
        finally:
            await supervisor.close()
    return 0


async def _host_agent(worker: "Worker", supervisor: "Supervisor", options: WorkerOptions) -> None:
    """Registers the agent of the options on the worker, with the runtime that they name."""
    from tenuto.worker.runtime.protocol import Runtime, RuntimeContext  # noqa: PLC0415  not for every command

    handlers = None if options.app is None else _load_handlers(options.app)
    name = options.runtime or ("command" if handlers is None else "function")
    context = RuntimeContext(worker.settings, supervisor, options.command, handlers)
    runtime: Runtime = RUNTIMES.load(name)(context)
    runs_only_task_commands = name == "command" and not options.command
    profile = AgentProfile(
        id=worker.engine.clock.new_id(),
        workspace=worker.engine.workspace,
        name=options.agent,
        agent_type=options.agent_type,
        task_types=runtime.task_types,
        task_tags=options.task_tags,
        capabilities=options.capabilities,
        runtimes=() if runs_only_task_commands else (runtime.name,),
        accept_commands=options.accept_commands and name == "command",
    )
    await worker.host(profile, runtime)


def _load_handlers(name: str) -> "dict[str | None, Handler]":
    """Imports `module:attribute`, a dict of handlers by task type; `Invalid` if it is none."""
    handlers = _import_attribute(name)
    is_by_type = isinstance(handlers, dict) and all(
        key is None or isinstance(key, str) for key in handlers
    )
    if not is_by_type or not all(callable(handler) for handler in handlers.values()):
        raise Invalid(f"{name} is not a dict of handlers by task type")
    return dict(handlers)


def _import_attribute(name: str) -> Any:
    """Returns what `module:attribute` names (default `handlers`); `Invalid` if the import fails."""
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), attribute or "handlers")
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Invalid(f"cannot load {name!r}: {reason[:_MAX_REASON_CHARS]}") from error


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncIterator["Service"]:
    """Opens store, hints and keys for the block, as the service that answers the API."""
    from tenuto.api.service import Service  # noqa: PLC0415  not for every command
    from tenuto.webhooks.url_guard import UrlGuard  # noqa: PLC0415

    async with open_store_and_hints(settings, listen=True, many_tenants=True) as (store, wakeups):
        guard = UrlGuard(split_commas(settings.webhook_allow))
        yield Service(store, wakeups, open_key_ring(settings), settings, guard.resolve_allowed)


async def _run_api(settings: Settings) -> int:
    """Serves the API until a signal stops it; returns the exit code."""
    from tenuto.api.server import serve  # noqa: PLC0415  not for every command

    stop = stop_on_signals()
    async with open_service(settings) as service:
        await serve(service, stop)
    return 0


async def _run_coordinator(settings: Settings) -> int:
    """Runs coordinator, webhook deliveries and pushes until a signal; returns the exit code."""
    stop = stop_on_signals()
    async with connect(settings, listen=bool(settings.gateways)) as engine:
        await _run_system_duties(engine, settings, stop)
    return 0


async def _run_system_duties(engine: Engine, settings: Settings, stop: asyncio.Event) -> None:
    """Runs what belongs to no tenant: the coordinator, webhook deliveries, pushes to gateways."""
    from tenuto.coordinator.coordinator import Coordinator  # noqa: PLC0415  not for every command
    from tenuto.engine.webhooks.deliveries import Deliveries  # noqa: PLC0415
    from tenuto.webhooks.deliver import Deliverer  # noqa: PLC0415
    from tenuto.webhooks.sender import Sender  # noqa: PLC0415
    from tenuto.webhooks.url_guard import UrlGuard  # noqa: PLC0415

    name = process_name(engine.clock)
    engine.actor = name
    log.info("coordinator %s", name)
    sender = Sender(UrlGuard(split_commas(settings.webhook_allow)), settings.webhook_timeout_s)
    deliverer = Deliverer(Deliveries(engine.system), sender, settings.tick_s)
    duties = [Coordinator(engine, settings, name=name).run(stop), deliverer.run(stop)]
    if settings.gateways:
        duties.append(_create_dispatcher(engine, settings, name).run(stop))
    await asyncio.gather(*duties)


def _create_dispatcher(engine: Engine, settings: Settings, name: str) -> "Dispatcher":
    """Creates the dispatcher, which pushes tasks to gateways while this coordinator leads."""
    from tenuto.api.auth.attempt_tokens import AttemptTokens  # noqa: PLC0415  not for every command
    from tenuto.coordinator.coordinator import NAME  # noqa: PLC0415
    from tenuto.coordinator.dispatch import SPAWN_SHARE, Dispatcher, DispatcherConfig  # noqa: PLC0415
    from tenuto.engine.agents.push import PushSessions  # noqa: PLC0415

    tokens = AttemptTokens(open_key_ring(settings), engine.clock)

    async def leads() -> bool:
        """Returns True if this coordinator leads now, or if no leader is elected."""
        if not settings.leader:
            return True
        leader = await engine.maintenance.leader(NAME)
        return leader is not None and leader.holder == name and leader.until > engine.clock.now()

    deadline_s = SPAWN_SHARE * settings.spawn_timeout_s
    config = DispatcherConfig(
        gateways={
            gateway: GATEWAYS.load(scheme_of(url))(
                gateway, url, settings.gateway_token, deadline_s=deadline_s
            )
            for gateway, url in settings.gateway_urls().items()
        },
        issue=lambda agent, workspace, fence: tokens.issue(agent, workspace, fence)[0],
        leads=leads,
        actor=name,
    )
    return Dispatcher(PushSessions(engine.system), config, settings)


async def _run_up(settings: Settings, workers: int) -> int:
    """Runs coordinator, API and workers until asked to stop; returns the exit code."""
    from tenuto.api.server import serve  # noqa: PLC0415  not for every command
    from tenuto.worker.process_pool import WorkerPool  # noqa: PLC0415

    stop = stop_on_signals()
    listen = bool(settings.gateways)
    async with connect(settings, listen=listen) as engine, open_service(settings) as service:
        worker_pool = WorkerPool(engine, settings, workers)
        log.info(
            "up on %s with %d worker(s); Ctrl-C drains",
            display_url(settings.database_url()),
            workers,
        )
        await asyncio.gather(
            _run_system_duties(engine, settings, stop), worker_pool.run(stop), serve(service, stop)
        )
    return 0
