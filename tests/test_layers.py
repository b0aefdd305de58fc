"""Imports point one way, and `import sc_core` brings nothing that it does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import sc_core

ROOT = Path(sc_core.__file__).parent
LAYERS = [
    {"errors"},
    {"records", "config"},
    {"ports", "disk", "calls", "returned"},
    {
        "barrier",
        "watched",
        "places",
        "events",
        "digest",
        "ordered",
        "manifest",
        "filters",
        "defaults",
        "clients",
        "step_trainer",
    },
    {"counts", "served", "spans"},
    {"books"},
    {"cut"},
    {"index", "staging"},
    {"conservation"},
    {"ledger"},
    {"samplers"},
    {"state", "rows", "decisions", "estimates", "bundle", "verify", "waits"},
    {"retention", "advantage", "weights", "causes", "budget", "attempt", "audit"},
    {"finaliser", "rollout", "difference", "stale", "report", "evaluation"},
    {"retake"},
    {"replay"},
    {"window", "watchdog"},
    {"train", "restore"},
    {"controller", "outlook"},
    {"embedding", "client_store"},
]
"""A module imports only from the sets above its own, and never from its neighbours there."""

SEEING = [
    {"lives", "thinned", "words", "files", "lanes", "rows"},
    {"standing", "windows"},
    {"history", "lifelines"},
    {"figures", "trace"},
    {"page"},
    {"report"},
]
"""The same of `sc_core.seeing`, which reads what a run wrote: nothing that runs may import it."""
READS = {"audit", "books", "errors", "events", "spans"}  #: what it may import of sc_core


def imports_of(module: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_every_module_has_a_layer() -> None:
    modules = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert modules == set().union(*LAYERS)
    seeing = {path.stem for path in (ROOT / "seeing").glob("*.py")} - {"__init__"}
    assert seeing == set().union(*SEEING)


def wrong_imports(directory: Path, layers: list[set[str]], above: set[str]) -> list[str]:
    wrong = []
    package = ".".join(directory.relative_to(ROOT.parent).parts) + "."
    for layer in layers:
        for name in sorted(layer):
            used = {
                module.removeprefix(package)
                for module in imports_of(directory / f"{name}.py")
                if module.startswith("sc_core.")
            }
            wrong += [f"{name} imports {other}" for other in sorted(used - above)]
        above = above | layer
    return wrong


def test_imports_point_one_way() -> None:
    assert wrong_imports(ROOT, LAYERS, set()) == []
    assert wrong_imports(ROOT / "seeing", SEEING, {f"sc_core.{name}" for name in READS}) == []


def test_sc_core_needs_anyio_and_msgspec_only() -> None:
    allowed = {"anyio", "msgspec", "sc_core", "__future__"} | sys.stdlib_module_names
    foreign = {
        f"{path.stem}: {module}"
        for path in [*ROOT.glob("*.py"), *ROOT.glob("seeing/*.py")]
        for module in imports_of(path)
        if module.split(".")[0] not in allowed
    }
    # read by `inspect --config` where it is installed; for a report alone
    assert foreign == {"__main__: yaml", "report: plotly.offline"}
    assert not [path for path in ROOT.rglob("*.py") if "pickle" in imports_of(path)]


def test_importing_sc_core_loads_none_of_the_world() -> None:
    script = (
        "import sys, sc_core;"
        "print(sorted({'ray', 'torch', 'trio', 'vllm', 'uvloop', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_listed_once_and_exist() -> None:
    assert len(sc_core.__all__) == len(set(sc_core.__all__))
    assert all(hasattr(sc_core, name) for name in sc_core.__all__)
    assert sc_core.__all__ == sorted(sc_core.__all__)


def test_sc_ray_uses_public_names_only() -> None:
    wrong = [
        f"{path.stem} imports {module}"
        for path in (ROOT.parent / "sc_ray").rglob("*.py")
        for module in imports_of(path)
        if module.startswith("sc_core.")
    ]
    assert wrong == []
