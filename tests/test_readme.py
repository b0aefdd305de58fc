"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from virtual_clock import VirtualClockLoop

from sc_core.config import ControllerConfig, decode
from sc_core.errors import StallError
from sc_core.records import Prompt
from sc_core.testing import MemoryRun

README = Path(__file__).parent.parent / "README.md"


def test_the_ten_lines_print_what_stands_below_them() -> None:
    example = re.search(
        r"```python\n(import anyio\n.*?)```\n\n```\n(.*?)```", README.read_text(), re.S
    )
    assert example is not None
    done = subprocess.run(
        [sys.executable, "-c", example[1]], capture_output=True, text=True, check=True
    )
    assert done.stdout == example[2]


async def lost_sibling() -> str:
    """The report of a run that waits for a rollout which never returns."""
    settings = {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2},
        "async_rl": {
            "sampler": {"name": "in_order", "max_lookahead_versions": 1},
            "deadlines": {"rollout_s": 7200},
        },
    }

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.group_id == "165.0":
            raise ConnectionError("engine 3 closed the connection")
        if (prompt.ordinal, sibling) == (166, 1):
            await anyio.sleep_forever()

    run = MemoryRun(
        decode(settings, ControllerConfig), range(500), latency=lambda *_: 2.5, script=script
    )
    with pytest.raises(StallError) as caught:
        await run.run()
    return str(caught.value)


def test_the_report_of_a_stall_is_what_it_shows() -> None:
    shown = re.search(r"```\n(no progress for .*?)\n```", README.read_text(), re.S)
    assert shown is not None
    told = anyio.run(lost_sibling, backend_options={"loop_factory": VirtualClockLoop})
    assert without_lines(shown[1]) == without_lines(told)


def without_lines(report: str) -> str:
    return re.sub(r"\.py:\d+", ".py", report)
