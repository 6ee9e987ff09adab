"""`orchestrate db`: migrate and check the database."""

from typing import TYPE_CHECKING

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import settings

if TYPE_CHECKING:
    from tenuto.store.protocol import SchemaState


@group("db", "orchestrate db migrate", "orchestrate db check --json")
def db() -> None:
    """Migrate and check the database."""


@command("migrate", "orchestrate db migrate --database postgresql://localhost/tenuto")
@click.pass_obj
def migrate(options: GlobalOptions) -> None:
    """Update the database schema. An embedded database is updated automatically."""
    from tenuto import app
    from tenuto.cli.render import print_json
    from tenuto.store.schema import REQUIRED_SCHEMA

    store = app.create_configured_store(settings(options))

    async def migrate_store() -> "tuple[list[int], SchemaState]":
        try:
            if (await store.schema()).schema >= REQUIRED_SCHEMA:
                await store.open()  # refuses a schema of a newer version before writing
            return await store.migrate(), await store.schema()
        finally:
            await store.close()

    applied, state = app.run(migrate_store())
    if options.json:
        print_json({"applied": applied, "schema": state.schema, "compat": state.compat})
    elif applied:
        print(f"applied {', '.join(map(str, applied))}; the schema version is now {state.schema}")
    else:
        print(f"nothing to do; the schema version is {state.schema}")


@command("check", "orchestrate db check", "orchestrate db check --json")
@click.pass_obj
def check(options: GlobalOptions) -> int:
    """Check the schema version, and that tasks and audit trail agree; exits with 1 if not.

    Run it once after a restore: it renumbers events that were restored from another server.
    """
    from tenuto import app
    from tenuto.cli.render import print_json
    from tenuto.engine.engine import Engine
    from tenuto.model.printable import printable

    store = app.create_configured_store(settings(options))

    async def check_store() -> "tuple[SchemaState, bool, list[str]]":
        try:
            await store.open()
            upkeep = Engine(store).maintenance
            return await store.schema(), await upkeep.renumber_events(), await upkeep.audit()
        finally:
            await store.close()

    state, restamped, mismatches = app.run(check_store())
    if options.json:
        print_json(
            {
                "ok": not mismatches,
                "schema": state.schema,
                "compat": state.compat,
                "restamped": restamped,
                "mismatches": mismatches,
            }
        )
    else:
        print(f"schema {state.schema} is compatible")
        if restamped:
            print("events restored from another server were renumbered")
        for mismatch in mismatches:
            print(printable(mismatch))
        print(f"{len(mismatches)} mismatches between tasks and audit trail")
    return 1 if mismatches else 0


for _command in (migrate, check):
    db.add_command(_command)
