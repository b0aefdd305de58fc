"""Runs the code blocks of a page of the documentation, from top to bottom, as a reader would.

What a fence says decides what becomes of its block:

* `python`: executed, all blocks of a page in one namespace
* `console`: each line that begins with `$ ` is executed by a shell; other lines are its output
* `yaml`: loaded as a configuration
* nothing: the output of the block before it

A comment on the line before a fence changes that:

* `<!-- varies -->`: figures in this output differ from run to run, the rest does not
* `<!-- while COMMAND -->`: these commands are for a run under way, which COMMAND starts
* `<!-- not ours -->`: YAML of another system
* `<!-- see FILE -->`: a test in FILE checks this block

In an output a line `…` stands for any lines, and `…` in a line for any characters.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
SHORT = (
    "grpo.max_num_steps=6 grpo.num_prompts_per_step=4 grpo.num_generations_per_prompt=2"
    " checkpointing.save_period=3 grpo.val_period=0"
)
"""Appended to every `train` of a page: six small steps instead of as many as the page says."""
DRY = re.compile(
    r"make (test|lint|chaos|explore|demo-vllm|demo-pretrained|bench[a-z-]*|install.*)$"
)
"""These take long, or are what runs this: `make -n` shows that the target is there. Their recipes
are run by hand, and what they are made of by other tests."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e-?\d+)?")
_UP_S = 180.0  #: until a run has made its first step


@dataclass
class Block:
    language: str
    text: str
    line: int  #: of its fence in the page
    note: str = ""  #: the comment before it


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    note = ""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "html_block":
            comment = re.fullmatch(r"<!--\s*(.*?)\s*-->\s*", token.content, re.S)
            note = comment[1] if comment else ""
        elif token.type == "fence" and token.map is not None:
            found.append(Block(token.info.strip(), token.content, token.map[0] + 1, note))
            note = ""
        elif token.type == "code_block" and token.map is not None:
            found.append(Block("indented", token.content, token.map[0] + 1))  # and refused
        elif token.type.endswith("_open"):
            note = ""
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def needs_ray(page: Path) -> bool:
    return any("sc_ray" in block.text or "make demo" in block.text for block in blocks_of(page))


class Reader:
    """Does what a page says in an empty directory of its own, which has the repository's files."""

    def __init__(self, page: Path, directory: Path) -> None:
        self._page = page
        self._directory = directory
        self._names: dict[str, Any] = {"__name__": "__page__"}
        for name in ("examples", "Makefile", "pyproject.toml", "sc_core", "sc_ray", "benchmarks"):
            (directory / name).symlink_to(ROOT / name)
        binaries = str(Path(sys.executable).parent)
        self._env = {
            **os.environ,
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}",
            "COLUMNS": "100",
        }

    def read(self) -> None:
        """Raises AssertionError, which names the block, where the page is not true."""
        printed = ""
        for block in blocks_of(self._page):
            where = f"{self._page.name}:{block.line}"
            try:
                printed = self._follow(block, printed)
            except Exception as exc:
                raise AssertionError(f"{where}: {type(exc).__name__}: {exc}") from exc

    def _follow(self, block: Block, printed: str) -> str:
        if block.note.startswith("see "):
            test = ROOT / block.note.removeprefix("see ")
            assert self._page.name in test.read_text(), f"{test} does not name {self._page.name}"
            return ""
        match block.language:
            case "python":
                return self._execute(block)
            case "console" if block.note.startswith("while "):
                with Run(block.note.removeprefix("while "), self._directory, self._env):
                    return self._shell(block)
            case "console":
                return self._shell(block)
            case "yaml":
                if block.note != "not ours":
                    self._configure(block.text)
                return ""
            case "":
                expect(block.text, printed, figures=block.note != "varies")
                return ""
        raise ValueError(f"a fence with {block.language!r} is none that is executed")

    def _execute(self, block: Block) -> str:
        out = io.StringIO()
        code = compile("\n" * block.line + block.text, str(self._page), "exec")
        sys.path.insert(0, str(self._directory))
        try:
            with chdir(self._directory), redirect_stdout(out):
                exec(code, self._names)
        finally:
            sys.path.remove(str(self._directory))
        return out.getvalue()

    def _configure(self, text: str) -> None:
        from sc_ray.settings import load_config

        file = self._directory / "page.yaml"
        file.write_text(text)
        with chdir(self._directory):
            load_config(str(file))

    def _shell(self, block: Block) -> str:
        """What the commands print. Output in the block itself is compared here."""
        everything = ""
        for command, shown in commands_of(block.text):
            got = self._run(command)
            if shown:
                expect(shown, got, figures=block.note != "varies")
            everything += got
        return everything

    def _run(self, command: str) -> str:
        bare = command.partition(" #")[0].strip()
        made = re.fullmatch(r"make ([a-z-]+)", bare)
        dry = DRY.match(bare)
        if made:
            done = self._do(f"make -n {made[1]}", cwd=ROOT)
            if dry:
                return ""
            bare = "\n".join(line for line in done.splitlines() if " -m sc_" in line)
        return self._do(shortened(bare.replace(".venv/bin/", "")), cwd=self._directory)

    def _do(self, command: str, cwd: Path) -> str:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command],
            cwd=cwd,
            env=self._env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout


def commands_of(text: str) -> list[tuple[str, str]]:
    """Each command of a console block, and the output that it shows."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].rstrip("\n"), ""))
        elif found:
            command, shown = found[-1]
            found[-1] = (command, shown + line)
        else:
            raise ValueError(f"output without a command: {line}")
    return found


def shortened(command: str) -> str:
    """The command with `SHORT` behind the settings of a `train` in it."""
    lines = []
    for line in command.splitlines():
        short = ""
        if re.search(r"-m sc_ray train\b", line):
            short = SHORT
        elif "-m sc_ray.demo_crash" in line:
            short = f"{SHORT} grpo.max_num_steps=40"  # it waits for up to ten after a checkpoint
        lines.append(f"{line} {short}".rstrip())
    return "\n".join(lines)


def expect(shown: str, got: str, *, figures: bool) -> None:
    """Raises AssertionError unless that was printed; without `figures`, numbers may differ."""
    pattern = ""
    for line in shown.splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
            continue
        parts = [re.escape(part) for part in line.rstrip().split("…")]
        quoted = ".*".join(parts)
        if not figures:
            quoted = _NUMBER.sub(lambda _: r"[\d.,e-]+", quoted.replace(r"\.", "."))
        pattern += quoted + r" *\n"
    ended = got if got.endswith("\n") else f"{got}\n"
    assert re.fullmatch(pattern, ended), f"shown:\n{shown}\nprinted:\n{got}"


class Run:
    """A run in the background, from its first step on, until it is stopped."""

    def __init__(self, command: str, directory: Path, env: dict[str, str]) -> None:
        self._command = shlex.split(f"{command} {SHORT} grpo.max_num_steps=100000")
        self._directory = directory
        self._env = env

    def __enter__(self) -> Run:
        out = self._directory / "background.txt"
        with out.open("w") as file:
            self._process = subprocess.Popen(
                self._command, cwd=self._directory, env=self._env, stdout=file, stderr=file
            )
        give_up = time.monotonic() + _UP_S
        while not re.search(r"^step \d+/", out.read_text(), re.M):
            running = self._process.poll() is None
            assert running and time.monotonic() < give_up, out.read_text()[-3000:]
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait(120)
