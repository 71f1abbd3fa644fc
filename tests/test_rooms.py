"""Rooms: what importing each one must not bring in, and which way imports may point."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wcache_async
from wcache_async.errors import known_codes

PACKAGE = Path(wcache_async.__file__).parent

ALLOWED: dict[str, set[str]] = {
    # room: the rooms it may import, at any time, types included
    "version": set(),
    "errors": set(),
    "manifest": {"errors"},
    "identity": {"errors", "manifest"},
    "protocol": {"errors", "manifest", "version"},
    "sockets": {"errors", "manifest", "protocol", "version"},
    "backends": {"errors", "manifest", "protocol", "sockets", "version"},
    "modules": {"errors", "manifest", "backends"},
    "sources": {"errors", "manifest", "identity", "backends", "modules", "version"},
    "daemon": {"errors", "manifest", "identity", "protocol", "sockets", "backends", "sources", "version"},
    "client": {"errors", "manifest", "identity", "protocol", "sockets", "backends", "modules", "version"},
}
BELOW = set(ALLOWED)
ALLOWED["integrations"] = BELOW
ALLOWED["cli"] = BELOW | {"integrations"}
ALLOWED["testing"] = BELOW | {"integrations", "cli"}

PURE = {"torch", "numpy", "asyncio", "uvloop", "socket", "selectors", "subprocess", "mmap", "cuda", "typer", "rich"}
NO_TORCH = {"torch", "numpy", "cuda", "safetensors", "transformers", "vllm"}

INSIDE_AN_ENGINE = {"integrations.vllm.loader"}
"""Modules that their engine imports, and that cannot be without it."""

ABSENT: dict[str, set[str]] = {
    # room, or a module of one, imported alone: what must not be loaded then
    "version": PURE,
    "errors": PURE,
    "manifest": PURE,
    "identity": PURE,
    "protocol": PURE,
    "daemon.states": PURE,
    "daemon.leases": PURE,
    "sockets": NO_TORCH | {"typer", "rich"},
    "backends": NO_TORCH | {"typer", "rich"},
    "modules": NO_TORCH | {"typer", "rich"},
    "sources": NO_TORCH | {"typer", "rich"},
    "daemon": NO_TORCH | {"typer", "rich", "wcache_async.client"},
    "client": NO_TORCH | {"typer", "rich", "wcache_async.daemon", "wcache_async.sources"},
    "cli": NO_TORCH,
    "integrations": {"transformers", "vllm"},
    "testing": NO_TORCH | {"typer", "rich"},
}


def modules_of(room: str) -> list[str]:
    """Dotted names of a room's modules, or of the one module it is, below the package."""
    path = PACKAGE.joinpath(*room.split("."))
    if not path.is_dir():
        return [room] if path.with_suffix(".py").exists() else []
    files = sorted(path.rglob("*.py"))
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return [name for name in names if not name.endswith("__main__")]


def rooms() -> set[str]:
    return {p.stem if p.is_file() else p.name for p in PACKAGE.iterdir() if not p.name.startswith(("_", "py.typed"))}


def loaded_by(statements: str) -> set[str]:
    """What sys.modules holds after the statements, in a Python of its own."""
    code = f"import sys\n{statements}\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def hit(loaded: set[str], absent: set[str]) -> set[str]:
    return {name for name in loaded if any(name == a or name.startswith(f"{a}.") for a in absent)}


# ------------------------------------------------------------------------------ when imported
@pytest.mark.parametrize("room", ABSENT)
def test_a_room_alone_brings_in_only_what_it_may(room: str) -> None:
    """All modules of the room.  For all but the last rooms, which use the public names, the package is an empty one."""
    names = [name for name in modules_of(room) if name not in INSIDE_AN_ENGINE]
    assert names, f"no such room: {room}"
    statements = ["import importlib, types"]
    if room.split(".")[0] in BELOW:
        statements += [
            "package = types.ModuleType('wcache_async')",
            f"package.__path__ = [{str(PACKAGE)!r}]",
            "sys.modules['wcache_async'] = package",
        ]
    loaded = loaded_by("\n".join(statements + [f"importlib.import_module('wcache_async.{name}')" for name in names]))
    assert {f"wcache_async.{name}" for name in names} <= loaded
    assert hit(loaded, ABSENT[room]) == set()


def test_the_package_brings_in_neither_torch_nor_cuda() -> None:
    loaded = loaded_by("import wcache_async")
    assert "wcache_async" in loaded
    assert hit(loaded, NO_TORCH | {"asyncio", "uvloop", "msgspec"}) == set()


def test_the_public_names_are_there_and_bring_in_neither_torch_nor_cuda() -> None:
    loaded = loaded_by("import wcache_async\nfor name in wcache_async.__all__: getattr(wcache_async, name)")
    assert "wcache_async.client.client" in loaded
    assert "wcache_async.daemon.lifecycle" in loaded
    assert hit(loaded, NO_TORCH) == set()


def test_star_import_gives_the_public_names() -> None:
    loaded_by("from wcache_async import *\nimport wcache_async\nassert set(wcache_async.__all__) <= set(globals())")


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clinet'"):
        wcache_async.Clinet  # noqa: B018


# --------------------------------------------------------------------------------- as written
@functools.cache
def sources() -> list[tuple[str, Path, ast.Module]]:
    """Dotted name below the package, file and syntax tree of every module."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        found.append((name, file, ast.parse(file.read_text(), str(file))))
    return found


def imported(name: str, is_package: bool, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported anywhere in a module."""
    parts = ["wcache_async", *name.split(".")] if name else ["wcache_async"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_every_room_is_in_the_tables() -> None:
    assert rooms() <= set(ALLOWED), "a new room needs its place in the order"
    assert rooms() <= set(ABSENT)


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_upward_only(room: str) -> None:
    permitted = ALLOWED[room] | {room}
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports {target}"
        for name, file, tree in sources()
        if name.split(".")[0] == room
        for line, target in imported(name, file.name == "__init__.py", tree)
        if target.startswith("wcache_async.") and target.split(".")[1] in rooms() - permitted
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ["errors", "manifest", "protocol", "daemon/states", "daemon/leases"])
def test_pure_rooms_import_no_world_not_even_for_types(room: str) -> None:
    wrong = [
        f"{name}:{line} imports {target}"
        for name, file, tree in sources()
        if (name + ".").startswith(room.replace("/", ".") + ".")
        for line, target in imported(name, file.name == "__init__.py", tree)
        if target.split(".")[0] in PURE | {"os", "time", "threading", "pathlib", "logging"}
    ]
    assert wrong == []


def test_every_error_class_is_in_the_errors_room() -> None:
    known = {cls.__name__ for cls in known_codes().values()}
    elsewhere = [
        f"{name}: {node.name}"
        for name, _, tree in sources()
        if name != "errors"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).split(".")[-1] in known for base in node.bases)
    ]
    assert elsewhere == []


def test_every_module_says_its_job_in_its_first_line() -> None:
    for name, _, tree in sources():
        docstring = ast.get_docstring(tree)
        assert docstring, f"{name or 'the package'} has no docstring"
        assert len(docstring.splitlines()[0]) <= 120
