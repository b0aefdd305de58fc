"""What NeMo RL has a key for and this project has not: where it is here, or what is done instead.

An answer names our keys in full; where there is none it says what holds.
"""

from __future__ import annotations

_BATCHES = "policy.optimizer.microbatch_rows says how many rows go through the model at once"
_LENGTH = (
    "policy.model.max_position_embeddings of a model from random weights, and"
    " generation.vllm.max_model_len, bound prompt and completion together"
)
_PARALLEL = "policy.workers and policy.sharding say how training is spread"
_GPUS = (
    "policy.workers take a GPU each where there are some; generation.workers and generation.gpus"
    " say what generation takes"
)
_ALWAYS = "every checkpoint has them"
_REWARD = "task.reward is a function, which may do that"
_SERVICES = "logger.wandb_enabled, logger.mlflow_enabled and logger.trackio_enabled are there"
_GRANULARITY = "rollout_recovery.default_granularity goes for all prompts"

ELSEWHERE = {
    "grpo.adv_estimator": "see advantages.estimator and the keys beside it",
    "grpo.async_grpo": (
        "runs are always asynchronous, as async_rl.sampler.name says;"
        " max_trajectory_age_steps is async_rl.sampler.max_staleness_versions"
    ),
    "grpo.batch_multiplier": "groups that are dropped are replaced by themselves",
    "grpo.dynamic_sampling_max_gen_batches": (
        "use async_rl.max_consecutive_filtered_groups, in groups without a commit between"
    ),
    "grpo.max_rollout_turns": "use task.max_turns",
    "grpo.normalize_rewards": "use advantages.normalize_rewards",
    "grpo.reward_scaling": _REWARD,
    "grpo.reward_shaping": _REWARD,
    "grpo.use_leave_one_out_baseline": "use advantages.use_leave_one_out_baseline",
    "grpo.val_batch_size": (
        "prompts of an evaluation go out like others: async_rl.max_inflight_prompts bounds them"
    ),
    "loss_fn": "its keys are those of policy.loss",
    "loss_fn.token_level_loss": "use policy.loss.token_level_loss",
    "loss_fn.use_on_policy_kl_approximation": "policy.loss.reference_policy_kl_type has estimates",
    "checkpointing.checkpoint_dir": "a run's checkpoints are in RUN/checkpoints; --out names RUN",
    "checkpointing.model_save_format": "weights are always saved as one safetensors file",
    "checkpointing.save_consolidated": "weights are always saved as one safetensors file",
    "checkpointing.save_data_plane": f"rows: {_ALWAYS}",
    "checkpointing.save_optimizer": f"the optimizer's moments: {_ALWAYS}",
    "rollout_checkpointing": "use checkpointing.ft_save_period and checkpointing.ft_keep_latest_k",
    "async_rl.diagnostics": "RUN/events.jsonl and RUN/logs have what happened to each prompt",
    "async_rl.generation_fleet_health.refit_timeout_s": "use async_rl.deadlines.weight_sync_s",
    "async_rl.generation_fleet_health.selection": "the engine with the fewest requests is next",
    "async_rl.generation_router": "requests go to engines through Ray alone",
    "async_rl.max_trajectory_age_steps": "use async_rl.sampler.max_staleness_versions",
    "async_rl.recompute_kv_cache_after_weight_updates": (
        "vLLM always recomputes it; generation.vllm.pause_mode says what becomes of requests"
    ),
    "async_rl.rollout_failure.max_replacement_attempts": (
        "a lost group is replaced until async_rl.rollout_failure.max_consecutive_dropped_prompts"
    ),
    "async_rl.rollout_failure.min_step_batch_fraction": (
        "set async_rl.rollout_failure.on_dropped_prompt to replace, and steps are whole"
    ),
    "async_rl.rollout_failure.native": "use async_rl.deadlines.rollout_s",
    "async_rl.rollout_failure.nemo_gym": "use async_rl.deadlines.rollout_s",
    "async_rl.stall_watchdog.gym_subprocess_check": "there are no such processes",
    "async_rl.stall_watchdog.interval_s": (
        "it looks when async_rl.stall_watchdog.stall_timeout_s may be over"
    ),
    "async_rl.stall_watchdog.stall_action": "a stall always ends the run, with a report",
    "rollout_recovery.agent_granularity_overrides": _GRANULARITY,
    "rollout_recovery.task_granularity_overrides": _GRANULARITY,
    "policy.dtensor_cfg": _PARALLEL,
    "policy.dynamic_batching": _BATCHES,
    "policy.generation": "its keys are those of generation.engine and beside it",
    "policy.generation.backend": "use generation.engine",
    "policy.generation.colocated": _GPUS,
    "policy.generation.max_new_tokens": "use task.max_new_tokens",
    "policy.generation.temperature": "use task.temperature",
    "policy.generation.top_k": "sampling is by task.temperature alone",
    "policy.generation.top_p": "sampling is by task.temperature alone",
    "policy.generation.vllm_cfg": (
        "use generation.vllm.max_model_len and the keys beside it;"
        " generation.vllm.engine_args takes what else vLLM has"
    ),
    "policy.generation.vllm_kwargs": "use generation.vllm.engine_args",
    "policy.generation_batch_size": "use generation.max_batch_rows",
    "policy.logprob_batch_size": _BATCHES,
    "policy.logprob_chunk_size": _BATCHES,
    "policy.max_grad_norm": "use policy.optimizer.max_grad_norm",
    "policy.max_total_sequence_length": _LENGTH,
    "policy.megatron_cfg": _PARALLEL,
    "policy.model_name": "policy.model.pretrained is a directory with the model",
    "policy.optimizer.kwargs": (
        "its keys are those of policy.optimizer.lr and beside it; betas are"
        " policy.optimizer.beta1 and policy.optimizer.beta2"
    ),
    "policy.optimizer.name": "it is AdamW",
    "policy.precision": "training is in float32; generation.vllm.dtype is of generation",
    "policy.sequence_packing": _BATCHES,
    "policy.tokenizer": "the one in policy.model.pretrained is used",
    "policy.train_global_batch_size": (
        "it is grpo.num_prompts_per_step times grpo.num_generations_per_prompt"
    ),
    "policy.train_micro_batch_size": "use policy.optimizer.microbatch_rows",
    "data": "task.jsonl is a file with prompts and answers, task.name a built-in task",
    "data.dataset_name": "task.jsonl is a file with prompts and answers, task.name a built-in task",
    "data.max_input_seq_length": _LENGTH,
    "data.shuffle": "use task.shuffle",
    "data.system_prompt_file": "task.system_prompt is the text itself",
    "data.train_data_path": "use task.jsonl",
    "data.val_data_path": "use task.val_jsonl",
    "env": "use task.environment for several turns, or task.reward for one",
    "reward_penalties": _REWARD,
    "logger.gpu_monitoring": "GPUs are not watched",
    "logger.monitor_gpus": "GPUs are not watched",
    "logger.num_val_samples_to_print": "samples are not printed",
    "logger.swanlab": _SERVICES,
    "logger.swanlab_enabled": _SERVICES,
    "logger.tensorboard": "logger.tensorboard_enabled and logger.log_dir are all there is",
    "cluster.gpus_per_node": _GPUS,
    "cluster.num_nodes": "cluster.address joins a Ray that runs on several nodes",
    "data_plane": "TransferQueue is always there; cluster.storage_units says how many hold rows",
    "token_capture": "use rollout_recovery.default_granularity to keep finished siblings",
}
