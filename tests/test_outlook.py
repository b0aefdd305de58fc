from __future__ import annotations

from typing import Any

import msgspec
import pytest
from make_bundles import make_cut

from sc_core.config import ControllerConfig, decode
from sc_core.outlook import Outlook, outlook
from sc_core.records import Cut, EvaluatedPrompt, Evaluation, LedgerRecord


def config(**sections: Any) -> ControllerConfig:
    """The settings that `make_cut` was saved under, with changes."""
    data: dict[str, Any] = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
        "async_rl": {"sampler": {"name": "windowed"}, "max_buffered_rollouts": 6},
    }
    for name, changes in sections.items():
        data[name] = data.get(name, {}) | changes
    return decode(data, ControllerConfig)


UNCHANGED = (
    "goes on from step 4, weight version 4",
    "generates 1 prompt anew that had been in flight",
    "has 4 of 6 places free",
)


def test_nothing_changes_under_the_same_settings() -> None:
    assert outlook(make_cut(), config()) == Outlook(notes=UNCHANGED)


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({"grpo": {"num_generations_per_prompt": 4}}, "have 2 siblings and .* is 4"),
        ({"async_rl": {"max_buffered_rollouts": 1}}, "max_buffered_rollouts is 1, but a step"),
    ],
)
def test_settings_that_cannot_go_on_are_refused(sections: dict[str, Any], refused: str) -> None:
    found = outlook(make_cut(), config(**sections))
    assert found.notes == ()
    with pytest.raises(AssertionError, match=refused):
        raise AssertionError(found.refused)


def test_other_prompts_are_refused_unless_allowed() -> None:
    changed = outlook(make_cut(), config(), source_fingerprint="prompts-v2")
    assert "fingerprint prompts-v1" in (changed.refused or "")
    allowed = config(checkpointing={"allow_changed_source": True})
    assert outlook(make_cut(), allowed, source_fingerprint="prompts-v2").notes == UNCHANGED


@pytest.mark.parametrize(
    ("sections", "note"),
    [
        ({"grpo": {"max_num_steps": 4}}, "ends at once: grpo.max_num_steps is 4"),
        ({"grpo": {"num_prompts_per_step": 1}}, "changes the groups per step from 2 to 1"),
        (
            {"async_rl": {"sampler": {"name": "ready_first"}}},
            "changes the sampler from windowed to ready_first",
        ),
        (
            {"async_rl": {"sampler": {"name": "in_order", "max_lookahead_versions": 1}}},
            "gives 2 groups another target step",
        ),
        (
            {"async_rl": {"max_buffered_rollouts": 2}},
            "keeps 2 groups in 2 places, and lets no new prompt in before a place is free",
        ),
        (
            {"checkpointing": {"load_replay_buffer": False}},
            "clears the rows of 1 ready group and generates the prompts anew:"
            " checkpointing.load_replay_buffer is false",
        ),
    ],
)
def test_what_a_changed_setting_does_is_said(sections: dict[str, Any], note: str) -> None:
    found = outlook(make_cut(), config(**sections))
    assert found.refused is None
    assert note in found.notes and note not in UNCHANGED


def older(cut: Cut) -> Cut:
    """Its committed group started two versions before the cut."""
    (group,) = cut.groups
    records = [
        msgspec.structs.replace(record, start_weight_version=2)
        if record.state == "committed"
        else record
        for record in cut.records
    ]
    return msgspec.structs.replace(
        cut,
        records=tuple(records),
        groups=(msgspec.structs.replace(group, start_weight_version=2),),
        sampler="ready_first",
    )


def test_ready_groups_that_are_too_old_for_another_sampler_are_given_up() -> None:
    assert (
        "gives up 1 ready group that windowed will never select: async_rl.on_stale_prompt is drop"
    ) in outlook(older(make_cut()), config()).notes


def test_a_source_that_had_ended_is_asked_once_more() -> None:
    cut = msgspec.structs.replace(make_cut(), exhausted=True)
    assert (
        outlook(cut, config()).notes[-1] == "asks the source once more, which had no more prompts"
    )


def test_what_was_in_flight_is_counted() -> None:
    records = tuple(LedgerRecord(ordinal=n, payload=None) for n in range(3))
    cut = msgspec.structs.replace(
        make_cut(), records=records, groups=(), counters={"trained": 8, "dropped": 0}
    )
    assert not any("in flight" in note for note in outlook(cut, config()).notes)


def test_an_evaluation_under_way_is_finished_where_there_are_evaluations() -> None:
    result = EvaluatedPrompt(number=2, rewards=(1.0,))
    under_way = Evaluation(
        weight_version=make_cut().weight_version, fingerprint="f", prompts=4, results=(result,)
    )
    cut = msgspec.structs.replace(make_cut(), evaluation=under_way)
    evaluating = config(grpo={"val_period": 2})
    told = f"evaluation of step {cut.step}: 3 of its 4 prompts"
    assert any(told in note for note in outlook(cut, evaluating).notes)
    assert not any("evaluation" in note for note in outlook(cut, config()).notes)
    finished = msgspec.structs.replace(under_way, summary={})
    cut = msgspec.structs.replace(cut, evaluation=finished)
    assert not any("evaluation" in note for note in outlook(cut, evaluating).notes)
