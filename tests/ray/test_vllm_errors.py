"""Why vLLM can't start, as it is told to somebody who has not read its log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sc_ray.generation.vllm_errors import in_one_line

PYDANTIC = """1 validation error for ModelConfig
  Value error, max_model_len (4096) is greater than 128 [type=value_error, \
input_value=ArgsKwargs((), {'model': [1, 2]}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""

SCRIPT = """
import subprocess, sys
from sc_ray.generation.vllm_errors import Written

print("ValueError: of before", flush=True)
written = Written()
child = "import sys; print(sys.argv[1], flush=True); sys.stderr.write('no news is good news\\\\n')"
subprocess.run([sys.executable, "-c", child, sys.argv[1]])
open(sys.argv[2], "w").write(written.last_error())
"""

CORE = """(EngineCore pid=7) ERROR 11-30 [core.py:1510] KeyError: 'an earlier one'
(EngineCore pid=7) ERROR 11-30 [core.py:1510]     raise ValueError(
(EngineCore pid=7) ERROR 11-30 [core.py:1510] torch.OutOfMemoryError: no room for 3 GB
(EngineCore pid=7) INFO 11-30 [core.py:1510] the end"""


def test_pydantic_s_remarks_for_programmers_are_left_out() -> None:
    told = "1 validation error for ModelConfig max_model_len (4096) is greater than 128"
    assert in_one_line(PYDANTIC) == told


@pytest.mark.parametrize(
    ("output", "words"), [(CORE, "torch.OutOfMemoryError: no room for 3 GB"), ("all is well", "")]
)
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_the_last_error_that_a_child_wrote_is_found(
    tmp_path: Path, output: str, words: str, kind: str
) -> None:
    with (tmp_path / "log").open("w") as log:
        to = log if kind == "file" else subprocess.PIPE
        found = tmp_path / "found"
        command = [sys.executable, "-c", SCRIPT, output, str(found)]
        subprocess.run(command, check=True, stdout=to, stderr=to)
    assert found.read_text() == (words if kind == "file" else "")
