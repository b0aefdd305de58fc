"""The settings that a run's decisions follow from, as its event log keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sc_core.config import ControllerConfig, SamplerConfig
from sc_core.errors import ConfigError, RestoreError
from sc_core.ports import Sampler
from sc_core.samplers import build_sampler


class DecisionSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """With these and the events alone, a sampler can be asked again. One per incarnation."""

    sampler: Mapping[str, Any] | None = None  #: `async_rl.sampler`
    sampler_object: str = ""  #: in its place: `module:Class` of one that was given ready-made
    groups_per_step: int
    groups_per_chunk: int
    places: int
    on_stale_prompt: Literal["drop", "requeue"] = "drop"
    max_stale_requeues: int = 0
    short_last_step: Literal["train", "drop"] = "train"
    granularity: Literal["prompt_group", "sibling"] = "prompt_group"
    load_replay_buffer: bool = True

    @staticmethod
    def of(config: ControllerConfig, places: int, given: Sampler | None) -> DecisionSettings:
        """Those of a controller with `places`; `given` is a sampler that is not the settings'."""
        groups_per_step, rl = config.grpo.num_prompts_per_step, config.async_rl
        kind = type(given)
        return DecisionSettings(
            sampler=msgspec.to_builtins(rl.sampler) if given is None else None,
            sampler_object="" if given is None else f"{kind.__module__}:{kind.__qualname__}",
            groups_per_step=groups_per_step,
            groups_per_chunk=rl.min_groups_for_streaming_train or groups_per_step,
            places=places,
            on_stale_prompt=rl.on_stale_prompt,
            max_stale_requeues=rl.max_stale_requeues,
            short_last_step=config.grpo.short_last_step,
            granularity=config.rollout_recovery.default_granularity,
            load_replay_buffer=config.checkpointing.load_replay_buffer,
        )

    @staticmethod
    def read(recorded: Mapping[str, Any] | None, where: str) -> DecisionSettings:
        """What an event recorded; `where` begins the error.

        Raises:
            RestoreError: nothing is there, or not all of it; names the first that is missing.
        """
        if recorded is None:
            raise RestoreError(
                f"{where} has no settings (sampler, groups_per_step, groups_per_chunk, places):"
                " it was written by a version that did not record them, and can't be replayed"
            )
        try:
            return msgspec.convert(recorded, DecisionSettings)
        except msgspec.ValidationError as exc:
            raise RestoreError(f"{where} has settings that can't be replayed: {exc}") from exc

    def build_sampler(self) -> Sampler:
        """A sampler as that incarnation had it; a custom one is imported.

        Raises:
            RestoreError: it can't be built from what is recorded.
        """
        if self.sampler is None:
            raise RestoreError(
                f"the run was given a sampler object, a {self.sampler_object or 'custom one'}, and"
                " its log can't tell how to build another: replay it with `sampler=`"
            )
        try:
            return build_sampler(msgspec.convert(self.sampler, SamplerConfig), self.groups_per_step)
        except (msgspec.ValidationError, ConfigError) as exc:
            raise RestoreError(f"the sampler that the log names can't be built: {exc}") from exc
