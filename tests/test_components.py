"""What a reward is made of: from the sample to the metrics, over restarts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from test_controller import at, uneven
from test_siblings import settings

from sc_core.errors import RolloutError
from sc_core.records import Prompt, Sample
from sc_core.returned import check_sample
from sc_core.testing import MemoryRun
from sc_core.testing.ports import MemoryEngines

pytestmark = pytest.mark.anyio


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reward has two parts, which make it up."""
    whole = MemoryEngines.rollout

    async def rollout(self: Any, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        sample = await whole(self, prompt, sibling, weight_version)
        kind = {"right": sample.reward / 4, "brief": sample.reward * 3 / 4}
        return replace(sample, components=kind, masked=sibling == 2)

    monkeypatch.setattr(MemoryEngines, "rollout", rollout)


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
async def test_each_component_is_a_metric_also_of_groups_from_before_a_restart(
    parts: None, granularity: str
) -> None:
    run = MemoryRun(settings(granularity=granularity), range(100), latency=uneven)
    assert await run.run(crash_when=at("trained", 5)) is None
    before = len(run.metrics.steps)
    assert await run.run() is not None
    assert len(run.metrics.steps) > before > 1
    for row in run.metrics.steps:
        right, brief = row["train/reward/right"], row["train/reward/brief"]
        assert right == pytest.approx(row["train/reward"] / 4)
        assert brief == pytest.approx(row["train/reward"] * 3 / 4)


async def test_rewards_without_components_have_no_such_metric() -> None:
    run = MemoryRun(settings(), range(100))
    assert await run.run() is not None
    assert not [
        name for row in run.metrics.steps for name in row if name.startswith("train/reward/")
    ]


@pytest.mark.parametrize(
    ("components", "says"),
    [
        ([("a", 1.0)], "has a value of type list for the components of its reward"),
        ({1: 1.0}, "has 1.0 for the component 1 of its reward"),
        ({"a": float("nan")}, "has nan for the component 'a' of its reward"),
        ({"a": "1"}, "has '1' for the component 'a' of its reward"),
    ],
)
async def test_components_that_no_bundle_could_hold_are_refused(components: Any, says: str) -> None:
    sample = Sample(fields={"tokens": [1]}, reward=1.0, components=components)
    with pytest.raises(RolloutError, match=says):
        check_sample(sample, "0", 1, weight_versions=range(1))
