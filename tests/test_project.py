"""What holds for the tree as a whole: who may import whom, what is never imported, what the papers claim."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from jserve import errors
from jserve.cli.main import VERBS
from jserve.cli.settings import ServeOptions

ROOT = Path(__file__).parent.parent
PACKAGES = ("jserve", "pallas_kernels", "sharding")
COMMON = {"jserve", "jserve.request", "jserve.errors", "jserve.config", "jserve.address", "jserve.progress"}
"""What every room of jserve may use."""
ROOMS: dict[str, set[str]] = {
    "pallas_kernels": set(),
    "sharding": set(),
    "jserve": {"jserve.llm"},
    "jserve.request": set(),
    "jserve.errors": set(),
    "jserve.config": set(),
    "jserve.address": set(),
    "jserve.progress": set(),
    "jserve.v1": set(),
    "jserve.text": set(),
    "jserve.models": {"pallas_kernels", "sharding"},
    "jserve.checkpoints": {"jserve.models", "jserve.text", "sharding"},
    "jserve.engine": {"jserve.models", "pallas_kernels", "sharding"},
    "jserve.observe": {"jserve.engine"},
    "jserve.wire": {"jserve.v1"},
    "jserve.serving": {"jserve.engine", "jserve.observe", "jserve.text", "jserve.v1", "jserve.wire"},
    "jserve.client": {"jserve.v1", "jserve.wire"},
    "jserve.llm": {"jserve.checkpoints", "jserve.load", "jserve.serving", "jserve.text"},
    "jserve.load": {
        "jserve.checkpoints",
        "jserve.engine",
        "jserve.models",
        "jserve.observe",
        "jserve.serving",
        "jserve.text",
        "sharding",
    },
    "jserve.cli": {"jserve.checkpoints", "jserve.client", "jserve.load", "jserve.serving"},
    "jserve.testing": {
        "jserve.checkpoints",
        "jserve.engine",
        "jserve.models",
        "jserve.observe",
        "jserve.serving",
        "jserve.text",
        "jserve.wire",
        "pallas_kernels",
        "sharding",
    },
}
"""Each room and the rooms below it. Arrows only point down."""


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def _imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written out in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room(name: str) -> str | None:
    """The room that a module or an imported name lies in; None outside the project."""
    parts = name.split(".")
    if parts[0] != "jserve":
        return parts[0] if parts[0] in PACKAGES else None
    two = ".".join(parts[:2])
    return two if two in ROOMS else "jserve"


def test_arrows_between_rooms_only_point_down():
    wrong = []
    for name, module in _modules():
        room = _room(name)
        allowed = {room, *ROOMS[room]} | (COMMON if room.startswith("jserve") else set())
        for imported in _imports(module):
            target = _room(imported)
            if target is not None and target not in allowed:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def _needs(module: ast.AST) -> Iterator[str]:
    """What it imports when it runs, at once or later: all but what types alone need."""
    for node in ast.iter_child_nodes(module):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from _needs(node)


def test_rooms_inside_checkpoints_need_only_those_below_them():
    order = ("arrays", "gguf", "hf", "orbax", "sources", "inspection", "own")
    start = "jserve.checkpoints."
    wrong = []
    for name, module in _modules():
        room = name.removeprefix(start).partition(".")[0]
        if name.startswith(start) and room in order:
            above = tuple(f"{start}{other}." for other in order[order.index(room) + 1 :])
            wrong += [f"{name} needs {needed}" for needed in _needs(module) if needed.startswith(above)]
    assert not wrong


def test_no_module_needs_itself_by_way_of_others():
    modules = dict(_modules())
    left = {name: {needed for needed in _needs(module) if needed in modules} for name, module in modules.items()}
    packages = {name for name in modules if any(other.startswith(f"{name}.") for other in modules)}
    left = {name: needed - packages for name, needed in left.items() if name not in packages}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left, "these are in a circle, or need one"


def test_every_folder_is_a_room():
    folders = {f"jserve.{path.name}" for path in (ROOT / "jserve").iterdir() if (path / "__init__.py").is_file()}
    assert folders <= set(ROOMS)


def test_pickle_is_imported_by_the_authenticated_program_store_only():
    users = {
        name
        for name, module in _modules()
        for imported in _imports(module)
        if re.match(r"(pickle|cPickle|_pickle|dill|cloudpickle|marshal|shelve|joblib)\b", imported)
        or "serialize_executable" in imported
    }
    assert users <= {"jserve.engine.store"}


@pytest.mark.parametrize(
    "module",
    [
        "jserve.config",
        "jserve.engine.contract",
        "jserve.engine.pages",
        "jserve.engine.scheduler",
        "jserve.errors",
        "jserve.request",
    ],
)
def test_these_modules_run_without_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_importing_jserve_is_light():
    code = "import sys, jserve; sys.exit(repr({'jax', 'grpc', 'pyarrow'} & set(sys.modules) or 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 or done.stderr.strip() == "0", done.stderr


def _commands() -> list[str]:
    """Every `jserve ...` line of the papers' code blocks and back-quoted words."""
    commands = []
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, flags=re.DOTALL)
        quoted = re.findall(r"`(jserve [^`\n]+)`", text)
        for line in [line for block in blocks for line in block.splitlines()] + quoted:
            commands += re.findall(r"(?:^|&& |\$ )(jserve [a-z][^#&|]*)", line.strip())
    return commands


def test_commands_of_the_papers_exist():
    commands = _commands()
    assert any(command.startswith("jserve demo") for command in commands)
    for command in commands:
        verb, *words = command.split()[1:]
        assert verb in VERBS, command
        options = getattr(importlib.import_module(f"jserve.cli.{verb}"), "Options", ServeOptions)
        known = {"--" + field.name.replace("_", "-") for field in fields(options)} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, command


def test_every_error_code_has_its_paragraph():
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name in errors.__all__:
        error = getattr(errors, name)
        if name in ("RequestError", "StartError"):
            continue
        row = next((line for line in text.splitlines() if line.startswith(f"| {error.code} |")), None)
        assert row is not None, f"{name} {error.code} is missing"
        assert f"`{name}`" in row
        assert row.endswith(f"| {error.exit_status} |")
        assert issubclass(error, errors.StartError) or f"| {error.grpc_status} |" in row
