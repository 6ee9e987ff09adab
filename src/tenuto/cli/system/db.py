"""`orchestrate db`: migrate and check the database."""

from typing import TYPE_CHECKING

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import settings

if TYPE_CHECKING:
    from tenuto.store.protocol import SchemaState


@group("db", "orchestrate db migrate", "orchestrate db check --json")
def db() -> None:
    """Migrate and check the database."""


@command("migrate", "orchestrate db migrate --database postgresql://localhost/tenuto")
@click.pass_obj
def migrate(given: Globals) -> None:
    """Bring the database's schema up to date. An embedded database does so by itself."""
    from tenuto import app
    from tenuto.cli.render import print_json
    from tenuto.store.schema import NEEDS

    store = app.configured_store(settings(given))

    async def main() -> "tuple[list[int], SchemaState]":
        try:
            if (await store.schema()).schema >= NEEDS:
                await store.open()  # refuses what a newer program made, before anything is written
            return await store.migrate(), await store.schema()
        finally:
            await store.close()

    applied, state = app.run(main())
    if given.json:
        print_json({"applied": applied, "schema": state.schema, "compat": state.compat})
    elif applied:
        print(f"applied {', '.join(map(str, applied))}; the schema is now {state.schema}")
    else:
        print(f"nothing to do; the schema is {state.schema}")


@command("check", "orchestrate db check", "orchestrate db check --json")
@click.pass_obj
def check(given: Globals) -> int:
    """Check that the schema fits and that tasks and audit trail agree; exit code 1 if not.

    Events that were restored from another server are numbered anew, so run it once after a restore.
    """
    from tenuto import app
    from tenuto.cli.render import print_json
    from tenuto.engine.engine import Engine
    from tenuto.model.printable import printable

    store = app.configured_store(settings(given))

    async def main() -> "tuple[SchemaState, bool, list[str]]":
        try:
            await store.open()
            upkeep = Engine(store).upkeep
            return await store.schema(), await upkeep.renumber_events(), await upkeep.audit()
        finally:
            await store.close()

    state, restamped, mismatches = app.run(main())
    if given.json:
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
        print(f"schema {state.schema} fits")
        if restamped:
            print("events restored from another server were numbered anew")
        for mismatch in mismatches:
            print(printable(mismatch))
        print(f"{len(mismatches)} mismatches between tasks and audit trail")
    return 1 if mismatches else 0


for _each in (migrate, check):
    db.add_command(_each)
