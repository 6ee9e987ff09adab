"""Writes the parts of the documents that are generated from the source.

`python docs/generate.py` fills every block between `<!-- begin: NAME -->` and `<!-- end: NAME -->`
in the documents and writes the files of `WRITTEN`. `--check` writes nothing and fails if a block
or a file does not match the source.
"""  # noqa: INP001  a program beside the pages, not a package

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import click
import generate_blocking
import generate_remote
import msgspec

from tenuto.api.app import litestar_app
from tenuto.api.operation import PUBLIC, V1, all_operations
from tenuto.cli.base import Command, Group
from tenuto.cli.root import cli
from tenuto.client import target
from tenuto.crash_points import POINTS
from tenuto.manifest.schema import json_schema as schema_of_yaml
from tenuto.manifest.shapes import FIELD_NAMES as YAML_NAMES
from tenuto.metrics import TABLE as METRICS
from tenuto.model import errors
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import AttemptCommand, DecisionContext, Fail, Failure
from tenuto.model.tasks.decide import decide
from tenuto.model.tasks.retry import RULES, ErrorClass
from tenuto.model.tasks.task import TERMINAL, TRANSITIONS, Fence, Status, Task, token_hash
from tenuto.settings import Settings
from tenuto.store import schema, sql
from tenuto.store.dialects import POSTGRES, SQLITE

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tenuto"
BLOCK = re.compile(r"^<!-- begin: ([a-z-]+) -->\n(.*?)^<!-- end: \1 -->$", re.M | re.S)
TABLES = {
    "workspace": "Workspaces: the tenants.",
    "definition": "Reusable definitions of tasks and groups, by key and version.",
    "flow": "Flows. `open` counts unfinished slots of the root, `failed` failed ones.",
    "task_group": "Runs of groups. `open` counts children that have not finished.",
    "flow_work": "Deferred work: the part of a cascade that was too large for one transaction.",
    "agent": "Agents, with the profile that matching reads.",
    "worker": "Workers, the agents that they host, and their last heartbeats.",
    "lane": "Lanes: the requirements that tasks share. `id` is a hash of `key`.",
    "task": "Tasks: the columns that decisions read or that transitions change.",
    "task_body": "The request of a task: written once, read when an attempt starts or a user asks.",
    "task_output": "Results of tasks.",
    "checkpoint": "The latest checkpoint of each task.",
    "task_label": "Tags of tasks for filters (`tags`).",
    "task_tag": "Task tags, which matching compares with the tags of an agent (`task_tags`).",
    "task_capability": "Capabilities that an agent must have.",
    "task_dependency": "Which task depends on which.",
    "task_step": "Recorded results of steps, by key; later attempts read them.",
    "attempt": "Ended attempts; the running attempt is in the task's row.",
    "transcript": "Log lines and printed output of attempts.",
    "artifact": "Named files of a task.",
    "event": "The audit trail and the outbox: one row per version of a task.",
    "leader": "The leader of each duty. It avoids duplicate work; correctness does not need it.",
    "cursor": "The position up to which each subscriber has read the events.",
    "app_user": "Users. A user may be a member of several workspaces.",
    "member": "Members of workspaces, with their roles.",
    "session": "Logins. `hash` is the hash of the token; the token is not stored.",
    "token": "API tokens, by hash.",
    "secret": "Named secrets, encrypted; `data` can be decrypted only for its row.",
    "task_secret": "The `secrets` of a task's input, encrypted together.",
    "webhook": "Webhook endpoints. `secret` has the encrypted signing secrets, new and previous.",
    "webhook_delivery": "Messages to webhook endpoints, with their tries.",
    "inbox_item": "Approvals and questions for people.",
    "idempotency": "Responses to requests with an `Idempotency-Key`, kept for a day.",
    "schedule": "Schedules.",
    "trigger_rule": "Triggers; they match events from `active_at` on.",
    "gate": "Pauses of lanes, agents, task types and workspaces.",
    "rate_limit": "Rate limits; a null provider, model or account means any. `taken` has the"
    " requests of the last minute as [microsecond, number]; `tokens` is what was left of the tokens"
    " at `counted_at`, below zero if more were used.",
    "spending": "Token usage and cost of attempts by model; `last` is the last report's number.",
    "turn_key": "Concurrency keys, locked to grant permits; `last` is the last queue number.",
    "task_turn": "Tasks with a concurrency key; those with `held` have a permit, others wait.",
    "gateway": "Gateways, with the state of their circuit breakers.",
    "agent_health": "Health samples of agents, kept for an hour.",
    "message": "Messages to agents; they never create tasks.",
    "child_wait": "The unfinished subtasks that a parked task waits for.",
    "transcript_size": "The size of each attempt's transcript, for its limit.",
}
"""What each table holds. A table that is missing here shows the comment in its migration."""
COMMON_OPTIONS = frozenset({"url", "token", "workspace", "database", "data", "json"})


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a markdown table; bars inside cells are escaped."""
    lines = [list(heads)]
    lines.append(["---"] * len(lines[0]))
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def fenced(language: str, text: str) -> str:
    """Returns a fenced markdown block."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def code(text: str) -> str:
    return f"`{text}`"


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yields path and syntax tree of the modules in these folders; of all modules without any."""
    for folder in folders or ("",):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yields every call with the last part of its function's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                yield node.func.attr, node


# --- the state machine


def command_classes() -> dict[str, list[type[commands.Command]]]:
    """Returns the model's command classes by their row of `TRANSITIONS`."""
    classes: dict[str, list[type[commands.Command]]] = defaultdict(list)
    for kind in vars(commands).values():
        if isinstance(kind, type) and issubclass(kind, commands.Command) and hasattr(kind, "name"):
            classes[kind.name].append(kind)
    return classes


def list_used_commands() -> set[str]:
    """Returns the rows of `TRANSITIONS` that the program uses."""
    called = {name for _, tree in sources() for name, _ in calls(tree)}
    used = {
        name
        for name, kinds in command_classes().items()
        if any(kind.__name__ in called for kind in kinds)
    }
    return used | (set(TRANSITIONS) & set(sql.load(SQLITE)))


def state_diagram() -> str:
    """Returns the transitions as a Mermaid diagram."""
    edges: dict[tuple[Status, Status], list[str]] = defaultdict(list)
    for command in sorted(list_used_commands() & set(TRANSITIONS)):
        for edge in TRANSITIONS[command]:
            edges[edge].append(command)
    order = list(Status)
    lines = ["stateDiagram-v2"]
    lines += [f"  [*] --> {status} : submit" for status in (Status.PENDING, Status.WAITING)]
    for (before, after), names in sorted(
        edges.items(), key=lambda item: (order.index(item[0][0]), order.index(item[0][1]))
    ):
        lines.append(f"  {before} --> {after} : {', '.join(names)}")
    lines += [f"  {status} --> [*]" for status in order if status in TERMINAL]
    return fenced("mermaid", "\n".join(lines))


def state_commands() -> str:
    """Returns the table of commands with their transitions."""
    used, classes = list_used_commands(), command_classes()
    order = list(Status)

    def in_order(statuses: Iterable[Status]) -> str:
        return ", ".join(sorted(set(statuses), key=lambda status: order.index(Status(status))))

    def fence(command: str) -> str:
        kinds = {issubclass(kind, AttemptCommand) for kind in classes.get(command, [])}
        return {frozenset({True}): "yes", frozenset({True, False}): "both"}.get(
            frozenset(kinds), "makes one" if command == "claim" else "no"
        )

    rows = [
        (
            code(command) + ("" if command in used else " (reserved)"),
            in_order(before for before, _ in moves),
            in_order(after for _, after in moves),
            fence(command),
        )
        for command, moves in TRANSITIONS.items()
    ]
    return table(("command", "from", "to", "fence"), rows)


def failures() -> str:
    """Returns the table of the effects of a first failure by error class."""
    now = datetime(2030, 1, 1, 10, tzinfo=UTC)
    fence = Fence(UUID(int=1), 1, "token")
    task = Task(
        id=fence.task,
        workspace=UUID(int=2),
        lane=1,
        status=Status.RUNNING,
        attempt=1,
        tries=1,
        timeout_s=60,
        lease_token=token_hash(fence.token),
        created_at=now,
        updated_at=now,
        started_at=now,
    )
    rows = []
    for kind in ErrorClass:
        failed = Fail(fence=fence, failure=Failure(message="", error_class=kind))
        change = decide(task, failed, DecisionContext(now))
        assert change is not None
        after = change.task
        rows.append(
            (
                code(kind.value),
                after.status.value,
                format_next_attempt(after, now),
                "yes" if after.tries else "no",
                change.event.level,
                ", ".join(list_remarks(kind, task, after)),
            )
        )
    return table(("class", "status", "next attempt in", "costs a try", "event level", ""), rows)


def format_next_attempt(after: Task, now: datetime) -> str:
    """Returns the delay until the task continues after a failure at `now`; empty if it does not."""
    if after.next_attempt_at is not None:
        return f"{(after.next_attempt_at - now).total_seconds():g} s ± 20 %"
    if after.resume_at is not None:
        hours = (after.resume_at - now).total_seconds() / 3600
        return f"{hours:g} h, after a failure at {now:%H:%M} UTC"
    return ""


def list_remarks(kind: ErrorClass, before: Task, after: Task) -> Iterator[str]:
    """Yields the other effects of a failure of the class."""
    if after.timeout_s != before.timeout_s:
        yield f"timeout {before.timeout_s} s becomes {after.timeout_s} s"
    if RULES[kind].parks:
        yield "WAITING until the reset time if the attempt reports one"


# --- errors, settings, crash points


def text_of(node: ast.expr | None, names: dict[str, str]) -> str | None:
    """Returns the text of an expression: a string, or a name in `names`; else `None`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return names.get(node.id) if isinstance(node, ast.Name) else None


def find_raised_codes() -> dict[str, set[str]]:
    """Returns the exception classes that each error code is raised with."""
    classes = {kind.__name__: kind for kind in errors.HTTP_STATUS}
    classes_by_code: dict[str, set[str]] = defaultdict(set)
    for _, tree in sources():
        names: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = text_of(node.value, {}) or ""
        for name, call in calls(tree):
            if name in classes:
                argument = call.args[1] if len(call.args) > 1 else None
                text = text_of(argument, names) if argument else classes[name].default_code
                classes_by_code[text or "?"].add(name)
    return classes_by_code


def find_quoted_codes() -> dict[str, set[str]]:
    """Returns the modules, except `errors.py`, that have each error code as a string."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path, tree in sources():
        if path != SOURCE / "model" / "errors.py":
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and node.value in errors.CODES:
                    modules[str(node.value)].add(path.relative_to(SOURCE).as_posix())
    return modules


def error_codes() -> str:
    """Returns the table of error codes."""
    raised, quoted = find_raised_codes(), find_quoted_codes()
    rows = [
        (code(name), ", ".join(map(code, sorted(raised[name] or quoted[name]))), meaning)
        for name, meaning in sorted(errors.CODES.items())
        if name != "internal"
    ]
    rows.append((code("internal"), "any other exception", errors.CODES["internal"]))
    return table(("code", "raised as, or named in", "meaning"), rows)


def error_classes() -> str:
    """Returns the table of error classes."""
    rows = [
        (
            code(kind.__name__),
            str(errors.HTTP_STATUS[kind]),
            str(errors.EXIT_CODE[kind]),
            (kind.__doc__ or "").strip(),
        )
        for kind in errors.HTTP_STATUS
    ]
    return table(("class", "HTTP status", "exit code", "means"), rows)


def field_docs(path: Path, name: str) -> dict[str, str]:
    """Returns the text under each annotated field of a class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name).body
    docs = {}
    for field, under in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = text_of(under.value, {}) if isinstance(under, ast.Expr) else None
            assert text, f"{name}.{field.target.id} has no text under it"
            docs[field.target.id] = text
    return docs


def settings() -> str:
    """Returns the table of settings."""
    docs = field_docs(SOURCE / "settings.py", "Settings")
    rows = []
    for field in msgspec.structs.fields(Settings):
        default = "empty" if field.default == "" else str(field.default).lower()
        name = f"TENUTO_{field.name.upper()}"
        rows.append(
            (code(field.name), code(name), field.type.__name__, code(default), docs[field.name])
        )
    return table(("setting", "environment", "type", "default", "meaning"), rows)


def server_settings() -> str:
    docs = field_docs(SOURCE / "client" / "target.py", "Login")
    variables = {"url": target.URL, "token": target.TOKEN, "workspace": target.WORKSPACE}
    rows = [
        (code(variables[name]), code(f"--{name}"), docs[name])
        for name in target.Login.__struct_fields__
    ]
    return table(("environment", "flag", "meaning"), rows)


def crash_points() -> str:
    """Returns the table of crash points."""
    by_part: dict[str, list[str]] = defaultdict(list)
    for point in sorted(POINTS):
        by_part[point.partition(".")[0]].append(code(point))
    return table(("part", "points"), ((part, ", ".join(p)) for part, p in by_part.items()))


# --- the command line


def walk_commands(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[str, click.Command]]:
    """Yields every command with its path, in the order of the help."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from walk_commands(subcommand, (*path, name))


def option_row(option: click.Option) -> tuple[str, str]:
    names = ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))
    metavar = option.metavar or option.type.name.upper()
    shown = names if option.is_flag else f"{names} {code(metavar)}"
    notes = [option.help or ""]
    if option.required:
        notes.append("Required.")
    if option.show_default:
        chosen = option.opts[0] if option.default else "".join(option.secondary_opts)
        notes.append(f"Default: {code(chosen) if option.is_flag else option.default}.")
    return shown, " ".join(notes)


def command_section(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    text = re.sub(r"\n +", "\n", (command.help or "").strip())
    parts = [f"## {path}\n", fenced("text", usage), f"{text}\n"]
    if isinstance(command, click.Group):
        names = [f"[`{name}`](#{path.replace(' ', '-')}-{name})" for name in subcommands(command)]
        parts.append(f"Commands: {', '.join(names)}.\n")
    options = [
        option_row(param)
        for param in command.params
        if isinstance(param, click.Option) and param.name not in COMMON_OPTIONS and not param.hidden
    ]
    if options:
        parts.append(table(("option", ""), options))
    if isinstance(command, Command | Group) and command.examples:
        parts.append(fenced("sh", "\n".join(command.examples)))
    return "\n".join(parts)


def subcommands(group: click.Group) -> list[str]:
    return group.list_commands(click.Context(group))


def command_line() -> str:
    shared = [
        option_row(param)
        for param in cli.params
        if isinstance(param, click.Option) and param.name in COMMON_OPTIONS
    ]
    head = "Every command takes:\n\n" + table(("option", ""), shared)
    sections = [
        command_section(path, command) for path, command in walk_commands(cli, ("orchestrate",))
    ]
    return "\n".join([head, *sections])


# --- the store


def find_used_queries() -> dict[str, set[str]]:
    """Returns the modules that use each query."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path, tree in sources():
        for name, call in calls(tree):
            first, others = call.args[:1], [keyword.value for keyword in call.keywords]
            arguments = others if name == "RuleKind" else first
            if name in ("Statement", "statement", "RuleKind"):
                for query in filter(None, (text_of(argument, {}) for argument in arguments)):
                    modules[query].add(path.relative_to(SOURCE).as_posix())
    return modules


def queries() -> str:
    """Returns the table of queries with their contracts."""
    text = sql.source_text()
    loaded, used = sql.load(POSTGRES), find_used_queries()
    rows = []
    for chunk in re.split(r"^(?=-- (?:name|fragment): )", text, flags=re.M)[1:]:
        if not chunk.startswith("-- name: "):
            continue
        lines = chunk.splitlines()
        name = lines[0].removeprefix("-- name: ")
        contract = []
        for line in lines[1:]:
            if not line.startswith("-- ") or re.match(r"-- (params|rows|as|answer): ", line):
                break
            contract.append(line.removeprefix("-- "))
        modules = [f"[{module}](../src/tenuto/{module})" for module in sorted(used[name])]
        sets = ", ".join(map(code, loaded[name].rows))
        rows.append((code(name), " ".join(contract), sets, ", ".join(modules)))
    return table(("query", "contract", "sets of rows", "used by"), rows)


def read_created_tables() -> Iterator[tuple[str, str]]:
    """Yields each table of the migrations with the comment above it."""
    for migration in schema.migrations():
        comment: list[str] = []
        for line in migration.text.splitlines():
            if match := re.match(r"create table (\w+)", line):
                yield match[1], " ".join(comment)
            is_comment = line.startswith("-- ") and not re.match(r"-- (only|end only)", line)
            comment = [*comment, line.removeprefix("-- ")] if is_comment else []


def tables() -> str:
    """Returns the table of database tables."""
    statements = " ".join(
        step.text for query in sql.load(POSTGRES).values() for step in query.steps
    )
    rows = {
        name: (
            code(name),
            TABLES.get(name, comment),
            "yes" if re.search(rf"\b(?:into|update|from|join) {name}\b", statements) else "not yet",
        )
        for name, comment in read_created_tables()
    }
    return table(("table", "holds", "in use"), rows.values())


def metrics() -> str:
    """Returns the table of metrics."""
    reporters = {
        "events": "each API, for the deployment",
        "sampler": "each API, for the deployment",
        "process": "each process, for itself",
    }
    rows = [
        (
            code(metric.name),
            metric.kind,
            ", ".join(code(label) for label in metric.labels),
            metric.help,
            reporters[metric.reported_by],
        )
        for metric in METRICS
    ]
    return table(("metric", "kind", "labels", "", "reported by"), rows)


def decisions() -> str:
    """Returns the table of decision records."""
    rows = []
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        number, _, title = path.read_text(encoding="utf-8").splitlines()[0][2:].partition(". ")
        rows.append((number, f"[{title}](docs/decisions/{path.name})"))
    return table(("no.", "decision"), rows)


def routes() -> str:
    """Returns the table of routes."""
    rows = []
    litestar_app()  # registers all operations
    for operation in all_operations():
        method, path = operation.route.split()
        access = operation.access
        needs = "anybody" if access is PUBLIC else f"{access.role.name}, `{access.scope}`"
        rows.append((code(method), code(path.removeprefix(V1)), needs))
    return table(("method", "path", "needs"), rows)


def yaml_schema() -> str:
    """Returns the published JSON Schema of YAML files."""
    text = msgspec.json.format(msgspec.json.encode(schema_of_yaml()), indent=2).decode()
    return f"{text}\n"


def yaml_fields() -> str:
    """Returns the table of fields of YAML files, with their aliases."""
    parts = schema_of_yaml()["$defs"]
    seconds = {names[0]: names[1:] for names in YAML_NAMES.values()}
    hidden = {name for names in seconds.values() for name in names}
    rows = []
    for shape, kind in (("TaskShape", "task"), ("GroupShape", "group")):
        for name, field in parts[shape]["properties"].items():
            if name not in hidden or (kind, name) == ("group", "next"):
                aliases = seconds.get(name, ())
                others = [alias for alias in aliases if alias in parts[shape]["properties"]]
                rows.append((kind, code(name), ", ".join(map(code, others)), yaml_type(field)))
    return table(("of a", "field", "also", "is"), rows)


def yaml_type(field: dict[str, Any]) -> str:
    """Returns the type of a schema field in words."""
    words = {"string": "text", "array": "list", "object": "mapping", "integer": "whole number"}
    types = []
    for option in field.get("anyOf", [field]):
        if "enum" in option:
            types.append(
                ", ".join(code(value) for value in option["enum"] if value[0].isupper())
                or ", ".join(map(code, option["enum"]))
            )
        elif "$ref" in option:
            shape = option["$ref"].rpartition("/")[2]
            names = schema_of_yaml()["$defs"][shape]["properties"]
            types.append("{" + ", ".join(map(code, names)) + "}")
        elif option.get("type") != "null":
            types.append(words.get(option.get("type", ""), option.get("type", "any value")))
    return " or ".join(types)


BLOCKS: dict[str, Callable[[], str]] = {
    "routes": routes,
    "state-diagram": state_diagram,
    "state-commands": state_commands,
    "failures": failures,
    "error-codes": error_codes,
    "error-classes": error_classes,
    "settings": settings,
    "server-settings": server_settings,
    "crash-points": crash_points,
    "command-line": command_line,
    "queries": queries,
    "tables": tables,
    "metrics": metrics,
    "decisions": decisions,
    "yaml-fields": yaml_fields,
}
WRITTEN: dict[str, Callable[[], str]] = {
    "docs/tenuto.schema.json": yaml_schema,
    generate_blocking.TARGET: generate_blocking.blocking_module,
    generate_remote.TARGET: generate_remote.remote_module,
}
"""Files that are generated as a whole."""


def pages(root: Path) -> list[Path]:
    """Returns the markdown pages with generated blocks."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def fill_blocks(text: str) -> str:
    """Returns the text of a page with all blocks generated again."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin: {name} -->\n{BLOCKS[name]()}<!-- end: {name} -->"

    return BLOCK.sub(fill, text)


def find_stale(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yields the pages that are not current, each with the text that it should have."""
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        if (current := fill_blocks(text)) != text:
            yield page, current
    for name, generate in WRITTEN.items():
        if (root / name).exists() and (current := generate()) != (root / name).read_text("utf-8"):
            yield root / name, current


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill the generated blocks of the documents.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is outdated"
    )
    argument: Any = parser.parse_args(arguments)
    outdated = list(find_stale())
    for page, current in outdated:
        if argument.check:
            sys.stderr.write(f"{page.relative_to(ROOT)} does not match the source\n")
        else:
            page.write_text(current, encoding="utf-8")
            sys.stdout.write(f"wrote {page.relative_to(ROOT)}\n")
    if outdated and argument.check:
        sys.stderr.write("run `python docs/generate.py`\n")
    return 1 if outdated and argument.check else 0


if __name__ == "__main__":
    sys.exit(main())
