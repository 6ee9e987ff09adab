"""Rules of this tree that no linter knows."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tenuto"
TESTS = ROOT / "tests"
PLAIN_WORDS = (SOURCE, TESTS, ROOT / "bench", ROOT / "docs", ROOT / "examples")
"""Folders whose names and docstrings are checked for replaced words."""

# Time, chance and ids enter through the clock; the supervisor runs alone, without our package.
CHEATS = re.compile(
    r"time\.(time|time_ns|sleep)|datetime\.(datetime|date)\.(now|utcnow|today)|uuid\.uuid[1-46-9]"
    r"|asyncio\.sleep|random\.[a-z_]+"
)
MAY_CHEAT = {SOURCE / "clock.py", SOURCE / "worker" / "supervisor.py"}
DRIVERS = {
    "asyncpg": {
        *(SOURCE / "store" / "postgres").glob("*.py"),
        SOURCE / "broker" / "postgres.py",
    },
    "sqlite3": set((SOURCE / "store" / "sqlite").glob("*.py")),
}
EVASIONS = re.compile(
    r"pytest\.(skip|xfail|importorskip|mark\.(skip|skipif|xfail))|unittest\.(skip|expected)\w*"
)
pytestmark = pytest.mark.xdist_group("tidy")  # one process parses the tree, once
SLEEPS = re.compile(r"(time|asyncio)\.sleep")
FILE_LINES = 560
FUNCTION_LINES = 70
# Words that a plain one replaced: each is banned as a part of a name, whatever stands beside it.
REPLACED_WORDS = {
    "birth births newborn newborns": "activation, new child",
    "latecomer latecomers": "added child",
    "dressed dressing": "input",
    "desk": "context",
    "heart hearts beat beats pulse": "heartbeat, lease status",
    "said say says saying unsaid": "report, body, message",
    "tell tells told untold": "report, notify, message",
    "hear heard hears unheard": "receive, notice",
    "bear bears sayable spoken": "the verb of the act",
    "happening happenings news": "event, change",
    "revival revived revives": "retry, reopen",
    "grave graves felt": "error, health",
    "strike strikes struck": "redact, inject",
    "victim victims": "target, dependent",
    "wish wishes": "request",
    "insist patience": "retry, timeout",
    "bury buried mend mended spare spared": "expire, repair, exempt",
    "foreign stranger strangers": "of another workspace, untrusted",
    "nobody somebody whoever": "the user, worker or agent that is meant",
}
# A name must say what it holds: none of these alone.
VAGUE_NAMES = frozenset(
    "each found given how kept known least made mine most place places said thing things wanted"
    " what who whose why works".split()
)
DOCSTRING_OPENINGS = frozenset(
    "Have Hear How It Its Nobody Nothing So Tell That Those What Whatever When Where Whether Who"
    " Whoever Whom Whose Why".split()
)
NAMES_TO_RENAME = {
    "src/tenuto/api/routes/agent_protocol.py": {"foreign_fences", "pulse"},
    "src/tenuto/engine/agents/gateways.py": {"found"},
    "src/tenuto/engine/agents/subtask_tree.py": {"kept"},
    "src/tenuto/model/agents/lifecycle.py": {"known"},
    "src/tenuto/model/flows/expressions/parser.py": {"known"},
    "src/tenuto/model/schedules/schedule.py": {"known"},
    "src/tenuto/model/webhooks.py": {"known"},
    "src/tenuto/store/sqlite/connection.py": {"places"},
    "tests/proof/sim/handlers.py": {"_tell"},  # called by the name of a step in a plan
}
"""Names that still have a replaced word. Remove an entry with its last name; add none."""
# A class of one letter keeps these patterns from finding themselves.
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(hom[e]/\w|User[s]/\w|roo[t]/|wor[k]/(main|shared))")
REGISTRIES = re.compile(r"pyp[i]\.org|pythonhoste[d]\.org|pyp[a]\.io|npmj[s]\.(org|com)")
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def files() -> list[Path]:
    """Every file that git tracks: an environment or a download beside them is nobody's text."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True
    )
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def lines() -> Iterator[tuple[str, str]]:
    """Every line of text in the tree, with the place where it stands."""
    for path in files():
        try:
            text = read(path)
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            yield f"{path.relative_to(ROOT)}:{number}", line


@cache
def modules(folder: Path) -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(read(path))) for path in sorted(folder.rglob("*.py"))]


def at(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str, str]]:
    """Each imported name as (statement, name here, full name); relative imports are ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                here = name.asname or name.name.partition(".")[0]
                yield node, here, name.name if name.asname else here
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                yield node, name.asname or name.name, f"{node.module}.{name.name}"


def uses(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Each use of an imported name, spelled in full whatever it is called here."""
    existing = {here: full for _, here, full in imports(tree)}

    def full_name(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            owner = full_name(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return existing.get(node.id, "") if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (name := full_name(node)):
            yield node, name
        elif isinstance(node, ast.Call) and full_name(node.func) == "random.Random":
            yield node, "random.random"


def uses_of(tree: ast.AST, pattern: re.Pattern[str]) -> list[ast.expr]:
    return [node for node, name in uses(tree) if pattern.fullmatch(name)]


@pytest.mark.parametrize(
    "cheat",
    [
        "import time\ntime.time()",
        "import time as t\nt.sleep(1)",
        "from datetime import datetime\ndatetime.now()",
        "import datetime as dt\ndt.datetime.utcnow()",
        "from uuid import uuid4\nfield(default_factory=uuid4)",
        "import random\nrandom.random()",
        "import random\nrandom.Random(1)",
        "import asyncio\nasync def f():\n  await asyncio.sleep(0)",
    ],
)
def test_cheat_is_detected_under_any_name(cheat: str) -> None:
    assert uses_of(ast.parse(cheat), CHEATS)


def test_passed_in_clock_is_no_cheat() -> None:
    honest = "import random, time\ndef f(r: random.Random, c): r.random(); c.sleep(1); c.time()"
    assert not uses_of(ast.parse(honest), CHEATS)


def test_time_chance_and_ids_enter_through_the_clock() -> None:
    trees = [(path, tree) for path, tree in modules(SOURCE) if path not in MAY_CHEAT]
    assert [at(path, node) for path, tree in trees for node in uses_of(tree, CHEATS)] == []


def test_driver_is_imported_only_in_its_own_file() -> None:
    assert [
        f"{at(path, node)} imports {name}"
        for path, tree in modules(SOURCE)
        for node, _, name in imports(tree)
        if path not in DRIVERS.get(name.partition(".")[0], {path})
    ] == []


def test_tests_skip_nothing_and_assert_no_constant() -> None:
    for path, tree in modules(TESTS):
        assert [at(path, node) for node in uses_of(tree, EVASIONS)] == []
        asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        assert [at(path, node) for node in asserts if isinstance(node.test, ast.Constant)] == []


def test_tests_wait_for_events_not_for_time() -> None:
    def is_fixed(call: ast.Call) -> bool:
        first = call.args[0] if call.args else None
        return isinstance(first, ast.Constant) and bool(first.value)

    for path, tree in modules(TESTS):
        if path == TESTS / "waiting.py" or TESTS / "proof" / "sim" in path.parents:
            continue  # the one poller, and the simulator, whose time is virtual
        sleeps = uses_of(tree, SLEEPS)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert [at(path, c) for c in calls if c.func in sleeps and is_fixed(c)] == []


def test_package_docstring_lists_its_files() -> None:
    missing = {}
    for package in sorted(SOURCE.rglob("__init__.py")):
        if package.parent == SOURCE:
            continue
        listed = set(re.findall(r"\w+", ast.get_docstring(ast.parse(read(package))) or ""))
        inside = {path.stem for path in package.parent.glob("*.py")} - {"__init__"}
        inside |= {path.parent.name for path in package.parent.glob("*/__init__.py")}
        if absent := inside - listed:
            missing[package.relative_to(ROOT)] = sorted(absent)
    assert missing == {}


def test_files_and_functions_are_short() -> None:
    trees = [*modules(SOURCE), *modules(TESTS), *modules(ROOT / "bench")]
    lengths = {
        path.relative_to(ROOT): len(read(path).splitlines())
        for path, _ in trees
        if not read(path).startswith("# Generated by ")
    }
    assert {path: count for path, count in lengths.items() if count > FILE_LINES} == {}
    assert [
        f"{at(path, node)} {node.name}"
        for path, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
    ] == []


def is_replaced(name: str) -> bool:
    """True if the name has a replaced word, or says nothing by itself."""
    banned = {word for words in REPLACED_WORDS for word in words.split()}
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return name in VAGUE_NAMES or any(part.lower() in banned for part in parts)


def own_names(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yields each function, class, parameter and variable with its name.

    Attributes of classes are left out: many are columns, JSON fields or settings.
    """
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    attributes = {target for body in bodies for line in body for target in targets(line)}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node, name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield node, name
            case ast.Name(id=name, ctx=ast.Store()) if node not in attributes:
                yield node, name


def targets(statement: ast.stmt) -> list[ast.expr]:
    """Returns what an assignment assigns to; nothing for other statements."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def replaced_names(path: Path, tree: ast.AST) -> list[str]:
    """Returns the places of names that use a replaced word."""
    file = str(path.relative_to(ROOT))
    allowed = NAMES_TO_RENAME.get(file, set())
    return [
        f"{file}:{getattr(node, 'lineno', 0)} {name}"
        for node, name in own_names(tree)
        if is_replaced(name) and name not in allowed
    ]


def unclear_docstrings(path: Path, tree: ast.AST) -> list[str]:
    """Returns the places of functions whose docstring does not begin with a verb or a noun."""
    return [
        f"{at(path, node)} {node.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and set(re.findall(r"\w+", ast.get_docstring(node) or "")[:1]) & DOCSTRING_OPENINGS
    ]


@pytest.mark.parametrize(
    "code",
    [
        "def births(): ...",
        "def list_newborns(): ...",
        "class DeskContext: ...",
        "def f(wish): ...",
        "def f(*, told_at): ...",
        "for each in rows: ...",
        "x = [found for found in rows]",
        "with f() as made: ...",
        "HEARTS = 1",
    ],
)
def test_replaced_name_is_found(code: str) -> None:
    assert len(replaced_names(ROOT / "planted.py", ast.parse(code))) == 1


def test_name_with_plain_words_is_accepted() -> None:
    code = "class A:\n  made: int\ndef heartbeat(bearer, not_found):\n  retold = 1"
    assert replaced_names(ROOT / "planted.py", ast.parse(code)) == []


@pytest.mark.parametrize(
    "opening", ["Whether it is.", "What it is.", "Those that are.", "Tell it."]
)
def test_docstring_with_replaced_opening_is_found(opening: str) -> None:
    path, accepted = ROOT / "planted.py", "def f():\n  'Returns what is new.'\ndef g(): ..."
    assert len(unclear_docstrings(path, ast.parse(f"def f():\n  '{opening}'"))) == 1
    assert unclear_docstrings(path, ast.parse(accepted)) == []


def test_names_use_no_replaced_word() -> None:
    trees = [module for folder in PLAIN_WORDS for module in modules(folder)]
    assert [name for path, tree in trees for name in replaced_names(path, tree)] == []


def test_docstrings_of_functions_begin_with_a_verb_or_a_noun() -> None:
    trees = [module for folder in PLAIN_WORDS for module in modules(folder)]
    assert [
        unclear_docstring
        for path, tree in trees
        for unclear_docstring in unclear_docstrings(path, tree)
    ] == []


def anchors(page: Path) -> set[str]:
    """The names that a markdown page's headings can be linked by."""
    seen: dict[str, int] = {}
    text = re.sub(r"^(```+).*?^\1", "", read(page), flags=re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#+ +(.+?) *#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, last in seen.items() for n in range(last + 1)}


def is_dead(page: Path, link: str) -> bool:
    """True if a relative link has no target: no such file, line or heading."""
    if re.match(r"[a-z][a-z+.-]*:", link):
        return False
    position, _, anchor = link.partition("#")
    target = page.parent / position if position else page
    if not target.resolve().exists():
        return True
    if line := re.fullmatch(r"L(\d+)(?:-L(\d+))?", anchor):
        return int(line[2] or line[1]) > len(read(target).splitlines())
    return bool(anchor) and target.suffix == ".md" and anchor not in anchors(target)


def links(page: Path) -> list[str]:
    return [a or b for a, b in LINK.findall(CODE.sub("", read(page)))]


def test_dead_link_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One & two\n`[x](code.md)` [y](b.md) [z](#one--two)\n\n[w]: a.md#L9\n")
    assert [link for link in links(page) if is_dead(page, link)] == ["b.md", "a.md#L9"]


def test_links_in_documents_have_targets() -> None:
    pages = [path for path in files() if path.suffix == ".md"]
    assert [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in links(page)
        if is_dead(page, link)
    ] == []


def test_changelog_has_the_version() -> None:
    version = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["version"]
    changelog = read(ROOT / "CHANGELOG.md")
    sections = re.findall(r"^## \[?([^\]\s]+)", changelog, re.MULTILINE)
    assert sections[:1] in (["Unreleased"], [version])


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, REGISTRIES], ids=["paths", "registries"])
def test_no_file_names_one_machine(pattern: re.Pattern[str]) -> None:
    assert [position for position, line in lines() if pattern.search(line)] == []
