"""What the settings amount to: task, prompts, tokenizer, estimator. Starts nothing."""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec

from sc_core import (
    AdvantageEstimator,
    ConfigError,
    build_sampler,
    check_capacity,
    check_scope,
)
from sc_ray.cluster import check_cpus
from sc_ray.generation.engine import check_engine
from sc_ray.phrasing import Phrasing
from sc_ray.prompts import HeldOutPrompts, TaskPrompts
from sc_ray.settings import TaskConfig, TrainConfig
from sc_ray.tasks import (
    Task,
    guess_digit,
    hold_out,
    larger_digit,
    load_environment,
    load_jsonl,
    load_reward,
    two_digit_sums,
)
from sc_ray.tasks.jsonl import read_prompts
from sc_ray.tokenizer import Tokenizer

_BUILT_IN = {
    "larger_digit": larger_digit,
    "guess_digit": guess_digit,
    "two_digit_sums": two_digit_sums,
}
_TURNS = 8
"""Of an episode with an environment of the user's, unless the settings say more."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings amount to, once they have been checked; starts nothing."""

    task: Task
    tokenizer: Tokenizer
    chat: bool = False  #: whether prompts go into the chat template

    @classmethod
    def of(cls, config: TrainConfig) -> Prepared:
        """Check what can be checked without Ray.

        Raises:
            ConfigError: the task, its reward, a model or a logger is not there; a step could
                never fill; or Ray would have too few CPUs.
        """
        config.logger.check()
        task = build_task(config.task, seed=config.grpo.seed)
        pretrained = config.policy.model.pretrained
        if pretrained and not Path(pretrained).is_dir():
            raise ConfigError(f"policy.model.pretrained: there is no directory {pretrained}")
        tokenizer = (
            Tokenizer.load(Path(pretrained))
            if pretrained
            else Tokenizer.of_characters(task.alphabet())
        )
        chat = _uses_chat_template(config, tokenizer)
        phrasing = Phrasing(tokenizer=tokenizer, chat=chat, system_prompt=config.task.system_prompt)
        phrasing.check(task)
        check_engine(config.generation.engine, batch_invariant=config.generation.batch_invariant)
        check_scope(config.controller, build_estimator(config))
        sampler = build_sampler(config.async_rl.sampler, config.grpo.num_prompts_per_step)
        check_capacity(config.controller, sampler)
        if config.cluster.address is None:
            check_cpus(config, config.cluster.num_cpus)
        return cls(task=task, tokenizer=tokenizer, chat=chat)


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """The task that the settings name.

    Raises:
        ConfigError: there is no such task, file or reward function, or a line is no prompt.
    """
    reward = None if config.reward is None else load_reward(config.reward)
    environment = None if config.environment is None else load_environment(config.environment)
    turns = config.max_turns
    if config.jsonl is not None:
        task = load_jsonl(Path(config.jsonl), reward=reward, environment=environment)
        turns = turns or (_TURNS if environment else None)
    elif config.name in _BUILT_IN:
        task = _BUILT_IN[config.name](seed=seed)
        if config.held_out:
            task = hold_out(task, config.held_out)
    else:
        near = difflib.get_close_matches(config.name, _BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"built in: {', '.join(_BUILT_IN)}"
        raise ConfigError(f"task.name: there is no task {config.name}; {hint}")
    if config.val_jsonl is not None:
        held_out = read_prompts(Path(config.val_jsonl), answers=task.environment is None)
        task = msgspec.structs.replace(task, held_out=held_out)
    if reward is not None and task.environment is not None:
        raise ConfigError(f"task.reward is set, and task {task.name} has an environment")
    return msgspec.structs.replace(
        task,
        reward=reward or task.reward,
        max_turns=turns or task.max_turns,
        max_new_tokens=config.max_new_tokens or task.max_new_tokens,
        characters=task.characters + config.characters,
    )


def build_prompts(config: TrainConfig, task: Task) -> TaskPrompts:
    """The stream of the task's prompts, from its beginning."""
    return TaskPrompts(
        task.prompts,
        seed=config.grpo.seed,
        shuffle=config.task.shuffle,
        max_epochs=config.grpo.max_num_epochs,
        batch=config.grpo.num_prompts_per_step if config.task.drop_last else 1,
    )


def build_held_out(task: Task) -> HeldOutPrompts | None:
    """The prompts of evaluations; None if the task has none."""
    return HeldOutPrompts(task.held_out) if task.held_out else None


def build_estimator(config: TrainConfig) -> AdvantageEstimator:
    """Raises ConfigError if a group is too small for it."""
    loss = config.policy.loss
    return config.advantages.build(
        group_size=config.grpo.num_generations_per_prompt,
        kl_in_reward=loss.reference_policy_kl_penalty if loss.use_kl_in_reward else 0.0,
    )


def _uses_chat_template(config: TrainConfig, tokenizer: Tokenizer) -> bool:
    wanted = config.task.chat_template
    if wanted == "auto":
        return bool(config.policy.model.pretrained) and tokenizer.has_chat_template
    if wanted and not tokenizer.has_chat_template:
        raise ConfigError("task.chat_template is true, and the tokenizer has no chat template")
    return wanted
