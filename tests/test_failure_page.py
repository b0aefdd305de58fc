"""docs/failure.md knows every error, and its report is one that a run gave."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

import anyio
import pytest
from virtual_clock import VirtualClockLoop

import sc_core.errors
from sc_core.config import ControllerConfig, decode
from sc_core.errors import StallError
from sc_core.records import Prompt
from sc_core.testing import MemoryRun

PAGE = Path(__file__).parent.parent / "docs" / "failure.md"


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
    shown = re.search(r"```\n(no progress for .*?)\n```", PAGE.read_text(), re.S)
    assert shown is not None
    told = anyio.run(lost_sibling, backend_options={"loop_factory": VirtualClockLoop})
    assert without_lines(shown[1]) == without_lines(told)


def without_lines(report: str) -> str:
    return re.sub(r"\.py:\d+", ".py", report)


def test_every_error_is_explained() -> None:
    ours = {
        name
        for name, value in vars(sc_core.errors).items()
        if isinstance(value, type) and issubclass(value, sc_core.ScError)
    }
    explained = set(re.findall(r"`(\w+)`", table_of_errors()))
    assert ours - {"ScError"} <= explained
    assert explained <= ours | set(dir(builtins))
    assert ours <= set(sc_core.__all__)


def table_of_errors() -> str:
    """The first column."""
    _, _, after = PAGE.read_text().partition("| error | it means | do this |\n|---|---|---|\n")
    rows = after.partition("\n\n")[0].splitlines()
    return "\n".join(row.split("|")[1] for row in rows)
