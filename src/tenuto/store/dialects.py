"""The SQL texts that differ between the two databases."""

import msgspec


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """SQL texts that differ between the two databases."""

    name: str
    seconds: str
    greatest: str
    lock: str
    skip_locked: str
    each: str
    """A table of one column `value`, with the items of an array parameter."""
    xid: str
    """The number of the transaction; constant where transactions never overlap."""
    place: str
    """The column with a row's physical place, valid until the end of the statement."""
    ascii: str
    """Suffix for a text so that `lower` changes ASCII letters only, in every locale."""
    own: str
    """A condition that holds for rows of the tenant; it must not make the planner use an index."""


POSTGRES = Dialect(
    name="postgres",
    seconds="(({0}) * interval '1 second')",
    greatest="greatest",
    lock="for update",
    skip_locked="for update skip locked",
    each="unnest(:{0}) as {0}(value)",
    xid="(select pg_current_xact_id()::text::bigint)",
    place="ctid",
    ascii=' collate "C"',
    own="",
)
SQLITE = Dialect(
    name="sqlite",
    seconds="(({0}) * 1000000)",
    greatest="max",
    lock="",
    skip_locked="",
    each="json_each(:{0}) as {0}",
    xid="0",
    place="rowid",
    ascii="",
    own="[workspace: and +{0}.workspace = :workspace]",
)
