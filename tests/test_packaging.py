"""What is built from the repository is what a user installs, and nothing else."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec
import pytest

import sc_core

ROOT = Path(__file__).parent.parent
PACKAGES = ("sc_core", "sc_ray")
VERSION = sc_core.__version__
NAME = f"single_controller-{VERSION}"


class Built(NamedTuple):
    wheel: Path
    sdist: Path
    tracked: frozenset[str]  #: files of the repository that they were built from

    def wheel_files(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def sdist_files(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            files = [member.name for member in archive.getmembers() if member.isfile()]
        return {name.removeprefix(f"{NAME}/") for name in files}

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as archive:
            return email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of what is tracked, and the wheel built from that sdist."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    tracked = [name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]
    source = tmp_path_factory.mktemp("source")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(
        command, cwd=source, env=clean_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    (sdist,) = (source / "dist").glob("*.tar.gz")
    return Built(wheel, sdist, frozenset(tracked))


def of_packages(names: frozenset[str] | set[str]) -> set[str]:
    return {name for name in names if PurePosixPath(name).parts[0] in PACKAGES}


def test_the_wheel_holds_the_two_packages_and_nothing_else(built: Built) -> None:
    files = built.wheel_files()
    assert built.wheel.name == f"{NAME}-py3-none-any.whl"
    assert of_packages(files) == of_packages(built.tracked)
    assert {"sc_core/py.typed", "sc_ray/py.typed", "sc_ray/configs/demo.yaml"} <= files
    rest = files - of_packages(files)
    assert all(name.startswith(f"{NAME}.dist-info/") for name in rest), rest
    assert f"{NAME}.dist-info/licenses/LICENSE" in rest


def test_the_sdist_holds_what_the_wheel_is_made_of_and_what_a_reader_wants(built: Built) -> None:
    files = built.sdist_files()
    assert of_packages(files) == of_packages(built.tracked)
    examples = {name for name in built.tracked if name.startswith("examples/")}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", *examples} <= files
    assert not [name for name in files if name.startswith(("tests/", "benchmarks/", "."))]


def test_the_metadata_is_that_of_pyproject(built: Built) -> None:
    told = built.metadata()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (told["Name"], told["Version"]) == (project["name"], VERSION)
    assert told["Requires-Python"] == project["requires-python"]
    assert told["License-Expression"] == "Apache-2.0"
    assert set(told.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    needed = told.get_all("Requires-Dist", [])
    base = [re.split(r"[<>=]", one)[0] for one in needed if "extra ==" not in one]
    assert base == ["anyio", "msgspec"]
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload(decode=True) == (ROOT / "README.md").read_bytes()


def test_the_changelog_has_a_place_for_what_comes() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and what it needs from ours."""
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(site)
    (site / "needed.pth").write_text(f"{Path(msgspec.__file__).parent.parent}\n")
    return environment / "bin" / "python"


def test_the_installed_package_works_alone(installed: Path) -> None:
    script = "import sc_core; print(sc_core.__file__, sc_core.__version__)"
    command = [installed, "-I", "-c", script]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [
        str(next(installed.parent.parent.glob("lib/python*/site-packages/sc_core/__init__.py"))),
        VERSION,
    ]


@pytest.mark.parametrize("name", ["asyncio_trainer.py", "trio_trainer.py"])
def test_an_example_is_strictly_typed_against_the_installed_package(
    name: str, installed: Path, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "examples" / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed, name],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
