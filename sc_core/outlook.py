"""What a resume from a cut would do under given settings, without doing it."""

from __future__ import annotations

import msgspec

from sc_core.config import ControllerConfig
from sc_core.errors import ConfigError, RestoreError
from sc_core.ledger import Ledger
from sc_core.records import Cut
from sc_core.restore import check_config, keeps_siblings
from sc_core.samplers import build_sampler, check_capacity


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    refused: str | None = None  #: why these settings can't go on from the cut
    notes: tuple[str, ...] = ()  #: what the resume would do, each as the end of "it …"


def outlook(
    cut: Cut, config: ControllerConfig, *, source_fingerprint: str | None = None
) -> Outlook:
    """Rebuild ledger and sampler from `cut` as a resume would, and say what that changes.

    Nothing is read or written. Without a `source_fingerprint` nothing is said about whether
    the prompts are still the same.
    """
    groups_per_step = config.grpo.num_prompts_per_step
    try:
        check_config(cut, config, source_fingerprint)
        sampler = build_sampler(config.async_rl.sampler, groups_per_step)
        places, _ = check_capacity(config, sampler)
        if cut.sampler == sampler.name:
            sampler.restore(cut.sampler_state)
    except (RestoreError, ConfigError) as exc:
        return Outlook(refused=str(exc))
    ledger = Ledger.restored(
        cut,
        prompts_per_step=groups_per_step,
        group_size=config.grpo.num_generations_per_prompt,
    )
    notes = [f"goes on from step {cut.step}, weight version {cut.weight_version}"]
    if cut.step >= config.grpo.max_num_steps:
        notes.append(f"ends at once: grpo.max_num_steps is {config.grpo.max_num_steps}")
    finished = sum(len(record.finished) for record in cut.records)
    if finished and keeps_siblings(config):
        notes.append(f"keeps {_count(finished, 'finished sibling')}, whose groups are not whole")
    elif finished:
        notes.append(
            f"clears the rows of {_count(finished, 'finished sibling')}, whose groups are not whole"
        )
    in_flight = sum(record.state == "in_flight" for record in cut.records)
    if in_flight:
        notes.append(f"generates {_count(in_flight, 'prompt')} anew that had been in flight")
    if not config.checkpointing.load_replay_buffer:
        for group in cut.groups:
            ledger.requeue(group.ordinal)
        notes.append(
            f"clears the rows of {_count(len(cut.groups), 'ready group')} and generates the"
            " prompts anew: checkpointing.load_replay_buffer is false"
        )
    if cut.sampler != sampler.name:
        notes.append(f"changes the sampler from {cut.sampler} to {sampler.name}")
    if cut.prompts_per_step != groups_per_step:
        notes.append(
            f"changes the groups per step from {cut.prompts_per_step} to {groups_per_step}"
        )
    changed = (cut.sampler, cut.prompts_per_step) != (sampler.name, groups_per_step)
    if sampler.stamps_targets and (changed or not config.checkpointing.load_replay_buffer):
        ledger.retarget(untargeted=True)
    if short := sum(cut.short_steps.values()):
        notes.append(f"makes steps to come shorter, by {_count(short, 'group')} that failed")
    evaluation = cut.evaluation
    if evaluation is not None and evaluation.summary is None and config.grpo.evaluates:
        missing = evaluation.prompts - len(evaluation.results)
        notes.append(
            f"finishes the evaluation of step {cut.step}: {missing} of its {evaluation.prompts}"
            " prompts are left, if they are still the same"
        )
    before = {record.ordinal: record.target_step for record in cut.records}
    moved = sum(record.target_step != before[record.ordinal] for record in ledger.records())
    if moved:
        notes.append(f"gives {_count(moved, 'group')} another target step")
    stale = len(sampler.evict(ledger))
    if stale:
        notes.append(
            f"gives up {_count(stale, 'ready group')} that {sampler.name} will never select:"
            f" async_rl.on_stale_prompt is {config.async_rl.on_stale_prompt}"
        )
    held = ledger.live_count
    if held < places:
        notes.append(f"has {places - held} of {_count(places, 'place')} free")
    else:
        notes.append(
            f"keeps {_count(held, 'group')} in {_count(places, 'place')}, and lets no new prompt"
            " in before a place is free"
        )
    if cut.exhausted:
        notes.append("asks the source once more, which had no more prompts")
    return Outlook(notes=tuple(notes))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
