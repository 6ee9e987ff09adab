"""The catalog of peers that are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A peer on a store: one row of the tables, measured by the adapter in `module`."""

    name: str
    module: str
    store: str  # postgresql, sqlite, redis
    packages: tuple[str, ...]  # the report lists their versions


# Peers on the same store are neighbours, so that they are measured seconds apart.
CATALOG = {
    entry.name: entry
    for entry in (
        Entry("tenuto-postgres", "bench.peers.tenuto", "postgresql", ("tenuto", "asyncpg")),
        Entry("pgqueuer", "bench.peers.pgqueuer", "postgresql", ("pgqueuer", "asyncpg")),
        Entry("bare-postgres", "bench.peers.bare", "postgresql", ("asyncpg",)),
        Entry("procrastinate", "bench.peers.procrastinate", "postgresql", ("procrastinate",)),
        Entry("tenuto-sqlite", "bench.peers.tenuto", "sqlite", ("tenuto",)),
        Entry("huey", "bench.peers.huey", "sqlite", ("huey",)),
        Entry("bare-sqlite", "bench.peers.bare", "sqlite", ()),
        Entry("celery", "bench.peers.celery", "redis", ("celery", "redis")),
    )
}
OURS = ("tenuto-postgres", "tenuto-sqlite")
