"""`python -m sc_ray` where only the base was installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))  # an import of these fails
from sc_ray.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("command", ["config", "train", "status", "verify"])
@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("yaml omegaconf ray torch transfer_queue rich", {"yaml", "ray"}),
        ("omegaconf", {"omegaconf"}),
    ],
)
def test_a_command_that_needs_the_extra_names_it_in_one_line(
    command: str, missing: str, named: set[str], tmp_path: Path
) -> None:
    takes = {"config": [], "train": ["--out", str(tmp_path / "run")]}.get(command, [str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, missing, command, *takes], capture_output=True, text=True
    )
    if command in ("status", "verify"):  # these do without
        assert done.returncode == 1
        assert "pip" not in done.stderr and "Traceback" not in done.stderr
        return
    assert done.returncode == 2
    line = done.stderr
    assert line.startswith("sc_ray: error: this needs ") and line.count("\n") == 1
    assert line.endswith(": pip install 'single-controller[ray]'\n")
    assert line.removeprefix("sc_ray: error: this needs ").partition(",")[0] in named
    assert not (tmp_path / "run").exists()
