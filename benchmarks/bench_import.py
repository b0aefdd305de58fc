"""What does `import sc_core` cost, and what does installing it?

- import: a process that imports it and ends, over one that does nothing, in milliseconds of CPU
  time; beside it what anyio and msgspec, which it needs, take of that. All from cached bytecode.
- install (`--install`): `pip install` of the wheel, without extras, into a fresh environment, from
  a warm cache: seconds, and megabytes of what that added. Bytecode, which pip compiles from the
  rest and Python can do without, is shown apart.

Targets are for a quiet machine.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from venv import EnvBuilder

import anyio

from benchmarks.measure import Ratio, Target, arguments, interleaved, report

BARE = "python that does nothing"
NEEDS = "import anyio, msgspec"
IMPORT = "import sc_core"
OVER = ", over nothing"
MILLISECOND = "one millisecond"
INSTALL, SECOND = "pip install", "one second"
FILES, BYTECODE, MEGABYTE = "files installed", "bytecode beside them", "one megabyte"

SCRIPTS = {BARE: "pass", NEEDS: NEEDS, IMPORT: IMPORT}
RATIOS = {
    "import_ms": Ratio(IMPORT + OVER, MILLISECOND, {"import": Target(at_most=150.0)}),
    "import_ms_anyio_msgspec": Ratio(NEEDS + OVER, MILLISECOND, {}),
    "install_s": Ratio(INSTALL, SECOND, {"install": Target(at_most=5.0)}),
    "install_mb": Ratio(FILES, MEGABYTE, {"install": Target(at_most=5.0)}),
    "install_mb_bytecode": Ratio(BYTECODE, MEGABYTE, {}),
}
MEGABYTES = dict.fromkeys((FILES, BYTECODE, MEGABYTE), "MB")
SECONDS = dict.fromkeys((INSTALL, SECOND), "s")

ROOT = Path(__file__).parent.parent


async def taken_by(script: str, environment: Mapping[str, str]) -> float:
    """CPU seconds of a process that runs `script`."""
    before = cpu_of_children()
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)  # noqa: ASYNC221
    return cpu_of_children() - before


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def importing(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        scripts = {name: partial(taken_by, script, environment) for name, script in SCRIPTS.items()}
        await interleaved(scripts, 1)  # writes the bytecode
        samples = await interleaved(scripts, rounds)
    for name in (NEEDS, IMPORT):
        pairs = zip(samples[name], samples[BARE], strict=True)
        samples[name + OVER] = [above - bare for above, bare in pairs]
    return {**samples, MILLISECOND: [1e-3] * rounds}


def quietly(*command: str | Path, cwd: Path) -> None:
    """Run a command that sees no Python package of ours."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        command,
        check=True,
        cwd=cwd,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def sizes(environment: Path) -> Mapping[str, int]:
    """Bytes of bytecode and of all other files below."""
    found = {FILES: 0, BYTECODE: 0}
    for file in environment.rglob("*"):
        if file.is_file() and not file.is_symlink():
            found[BYTECODE if file.suffix == ".pyc" else FILES] += file.stat().st_size
    return found


def installing(rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {INSTALL: [], FILES: [], BYTECODE: []}
    with tempfile.TemporaryDirectory() as directory:
        there = Path(directory)
        source = there / "source"  # a build leaves things beside what it builds
        for name in ("sc_core", "sc_ray"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.pyc"))
        for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
            shutil.copy(ROOT / name, source)
        quietly(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=source)
        (wheel,) = (source / "dist").glob("*.whl")
        for round in range(rounds + 1):  # the first warms pip's cache
            environment = there / f"environment{round}"
            EnvBuilder(with_pip=True).create(environment)
            before = sizes(environment)
            python = environment / "bin" / "python"
            started = perf_counter()
            quietly(python, "-m", "pip", "install", wheel, cwd=there)
            taken = perf_counter() - started
            if round:
                samples[INSTALL].append(taken)
                for name, size in sizes(environment).items():
                    samples[name].append((size - before[name]) / 1e6)
    return {**samples, SECOND: [1.0] * rounds, MEGABYTE: [1.0] * rounds}


def main() -> None:
    asked = arguments(__doc__, install="also install it, over and over: a minute")
    taken = {"import": anyio.run(importing, 5 if asked.quick else 41)}
    if asked.install:
        taken["install"] = installing(1 if asked.quick else 5)
    report(taken, RATIOS, asked.json, "ms", {**SECONDS, **MEGABYTES})


if __name__ == "__main__":
    main()
