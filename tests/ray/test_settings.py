"""Settings: files, names and `key=value`, and what each refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sc_core.config import ControllerConfig, decode
from sc_core.errors import ConfigError
from sc_ray.settings import TrainConfig, builtin_configs, load_config, to_plain


def refused(source: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_built_in_configuration_loads() -> None:
    assert builtin_configs() == ["demo", "exact", "pretrained", "vllm"]
    tasks = {name: load_config(name).task.name for name in builtin_configs()}
    assert tasks.pop("pretrained") == "two_digit_sums"
    assert set(tasks.values()) == {"larger_digit"}


def test_the_demo_is_asynchronous_and_the_exact_one_is_not() -> None:
    demo, exact = load_config("demo"), load_config("exact")
    assert demo.async_rl.sampler.name == "windowed"
    assert demo.async_rl.sampler.max_staleness_versions == 1
    assert demo.checkpointing.save_period == 10
    assert exact.async_rl.sampler.name == "in_order"
    assert exact.async_rl.sampler.max_lookahead_versions == 0
    assert exact.generation.batch_invariant


def test_overrides_are_yaml_and_the_last_one_counts() -> None:
    config = load_config(
        "demo",
        [
            "grpo.max_num_steps=7",
            "grpo.max_num_steps=9",
            "policy.optimizer.lr=1e-4",
            "async_rl.sampler.sample_freshest_first=true",
            "cluster.address=null",
            "task.jsonl=some/file.jsonl",
        ],
    )
    assert config.grpo.max_num_steps == 9
    assert config.grpo.num_prompts_per_step == load_config("demo").grpo.num_prompts_per_step
    assert config.policy.optimizer.lr == 1e-4
    assert config.async_rl.sampler.sample_freshest_first is True
    assert config.cluster.address is None
    assert config.task.jsonl == "some/file.jsonl"


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.e-3", ".1e-2", "+1e-3", "0.001"])
def test_a_number_is_a_number_however_it_is_written(number: str) -> None:
    assert load_config("demo", [f"policy.optimizer.lr={number}"]).policy.optimizer.lr == 1e-3


def test_the_controller_gets_its_own_part() -> None:
    changes = ["grpo.seed=5", "rollout_recovery.default_granularity=sibling"]
    config = load_config("demo", changes)
    for section in ControllerConfig.__struct_fields__:
        assert getattr(config.controller, section) == getattr(config, section)
    assert config.controller != load_config("demo").controller


@pytest.mark.parametrize("budget", ["10:00:00:00", "00:03:45:00"])
def test_a_time_is_no_number(budget: str) -> None:
    config = load_config("demo", [f"checkpointing.checkpoint_must_save_by={budget}"])
    assert config.checkpointing.checkpoint_must_save_by == budget


def test_settings_survive_as_plain_data() -> None:
    config = load_config("exact", ["event_loop=trio"])
    assert decode(json.loads(json.dumps(to_plain(config))), TrainConfig) == config


def test_files(tmp_path: Path) -> None:
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("grpo:\n  seed: 3\n")
    json_file = tmp_path / "mine.json"
    json_file.write_text('{"grpo": {"seed": 3}}')
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    assert load_config(str(yaml)) == load_config(str(json_file))
    assert load_config(str(empty)) == TrainConfig()
    assert load_config(str(empty), ["grpo.seed=3"]) == load_config(str(yaml))


def test_a_mistake_is_reported_where_it_was_made(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("grpo:\n  max_num_step: 3\n")
    assert refused(str(file)) == (
        f"{file}: unknown key grpo.max_num_step; did you mean grpo.max_num_steps?"
    )
    assert refused(str(file), "grpo.seed=1").startswith(f"{file}: unknown key")
    assert refused("demo", "policy.optimizer.lrr=1") == (
        "command line: unknown key policy.optimizer.lrr; did you mean policy.optimizer.lr?"
    )
    file.write_text("grpo:\n  - [1\n")
    assert f"{file}:3: not YAML" in refused(str(file))
    file.write_text("just text")
    assert "a mapping of settings was expected" in refused(str(file))
    file.write_bytes(b"\xff\xfe\x00")
    assert f"{file} can't be read" in refused(str(file))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("grpo.max_num_steps", "'grpo.max_num_steps' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("grpo..seed=3", "'grpo..seed=3' is not of the form key=value"),
        ("grpo.seed=[", "grpo.seed:1: not YAML"),
        ("grpo.seed=a: b: c", "grpo.seed:1: not YAML"),
        ("grpo.max_num_steps=many", "grpo.max_num_steps is 'many'; it must be an int"),
        ("event_loop=twisted", "event_loop is 'twisted'; it is one of"),
        (
            "async_rl.sampler.name=window",
            " it is one of in_order, weight_fifo, ready_first, windowed,",
        ),
        ("checkpointing.checkpoint_must_save_by=3:45", "is '3:45'; it must be dd:hh:mm:ss"),
        ("generation.workers=0", "generation.workers is 0; it must be at least 1"),
        (
            "async_rl.generation_fleet_health.min_healthy_shards=3",
            "async_rl.generation_fleet_health.min_healthy_shards is 3, more than the 1 of"
            " generation.workers",
        ),
        (
            "async_rl.generation_fleet_health.probe_interval_s=0",
            "async_rl.generation_fleet_health.probe_interval_s is 0.0; it must be above 0 and"
            " finite",
        ),
        (
            "async_rl.generation_fleet_health.unhealthy_threshold=0",
            "async_rl.generation_fleet_health.unhealthy_threshold is 0; it must be at least 1",
        ),
        ("generation.gpus=-1", "generation.gpus is -1.0; it must be at least 0"),
        ("generation.vllm.max_model_len=1", "vllm.max_model_len = 1 must be at least 2"),
        ("generation.vllm.kv_cache_gib=0", "vllm.kv_cache_gib = 0 must be above 0"),
        ("generation.vllm.pause_mode=hold", "generation.vllm.pause_mode"),
        ("policy.threads=0", "policy.threads is 0"),
        ("policy.workers=0", "policy.workers is 0"),
        ("policy.sharding=ddp", "policy.sharding is 'ddp'; it is one of"),
        ("policy.scheduler.min_lr_ratio=2", "scheduler.min_lr_ratio is 2"),
        (
            "policy.scheduler={name: cosine, warmup_steps: 100}",
            "scheduler.warmup_steps is 100, and the last step, where the rate of cosine is lowest"
            " unless decay_steps is set, is 100; it must be more",
        ),
        ("cluster.storage_units=0", "cluster.storage_units is 0"),
        ("task.temperature=-1", "task.temperature is -1"),
        ("task.temperature=0", "(of evaluations, task.val_temperature may be 0)"),
        ("task.temperature=.inf", "task.temperature is inf; it must be above 0, and finite"),
        ("task.val_temperature=.nan", "task.val_temperature is nan; it must be at least 0"),
        ("policy.optimizer.lr=.nan", "optimizer.lr is nan; it must be above 0, and finite"),
        ("policy.model.num_hidden_layers=0", "model.num_hidden_layers is 0; it must be at least 1"),
        ("task.max_new_tokens=0", "task.max_new_tokens is 0"),
        ("task.held_out=-1", "task.held_out is -1"),
        ("task.held_out=0", "set task.val_jsonl, or task.held_out of a built-in task"),
        ("grpo.num_generations_per_prompt=0", "grpo.num_generations_per_prompt is 0"),
        ("async_rl.min_groups_for_streaming_train=99", "async_rl.min_groups_for_streaming_train"),
        ("policy.model.num_attention_heads=5", "num_attention_heads = 5"),
        (
            "advantages={estimator: gdpo, reward_weights: [1, 2]}",
            "advantages.reward_weights is set, and the task's own reward is one number",
        ),
        (
            "advantages.baseline=median",
            " it is one of leave_one_out, mean, null",
        ),
        ("task.chat_template=maybe", " it is one of true, false, auto"),
        ("advantages.estimator=grpp", "it is one of grpo, dr_grpo, rloo, reinforce_plus_plus,"),
        ("advantages.estimator=gae", "needs the values of a critic, and this trainer has none"),
        ("advantages.reward_weights=[1,2]", "advantages.estimator is grpo; only gdpo has it"),
        ("advantages.normalize_rewards=false", "is False, and advantages.normalize is True"),
        ("policy.loss.reference_policy_kl_type=k4", "it is one of k1, k2, k3"),
        (
            "policy.loss.reference_policy_kl_penalty=-1",
            "kl_penalty is -1.0; it must be at least 0",
        ),
        ("policy.loss.ratio_clip_min=2", "policy.loss.ratio_clip_min is 2.0; it must be at most 1"),
    ],
)
def test_what_can_not_be_is_refused_by_name(override: str, says: str) -> None:
    message = refused("demo", override)
    assert message.startswith("command line: ")
    assert says in message


def test_a_section_that_is_a_value(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("event_loop: trio\n")
    assert refused(str(file), "event_loop.name=x") == (
        "command line: event_loop is 'trio' and has no key name"
    )


def test_an_unknown_configuration_names_the_nearest() -> None:
    assert "did you mean demo?" in refused("dmo")
    assert "built in are demo, exact" in refused("/nowhere/at/all.yaml")


def test_an_event_loop_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'single-controller[uvloop]'" in refused("demo", "event_loop=uvloop")
    assert load_config("demo", ["event_loop=asyncio"]).event_loop == "asyncio"


def test_cpus_are_counted_per_process() -> None:
    few = load_config("demo", ["generation.workers=1", "cluster.storage_units=1"])
    many = load_config("demo", ["generation.workers=3", "cluster.storage_units=4"])
    assert few.cpus_needed == 5  # trainer, generation, controller, and TransferQueue's two
    assert many.cpus_needed == 10
    assert load_config("demo", ["policy.workers=3"]).cpus_needed == 8


def test_the_demo_evaluates_its_own_task_and_another_one_if_asked_to() -> None:
    def evaluates(*overrides: str) -> bool:
        return load_config("demo", overrides).grpo.evaluates

    assert evaluates() and evaluates("task.val_jsonl=held_out.jsonl")
    assert not evaluates("task.jsonl=mine.jsonl")
    assert evaluates("task.jsonl=mine.jsonl", "task.val_jsonl=held_out.jsonl")
    message = refused("demo", "task.jsonl=mine.jsonl", "grpo.val_period=3")
    assert "there are no prompts for it: set task.val_jsonl" in message


@pytest.mark.parametrize("estimator", ["rloo", "opo", "reinforce_plus_plus", "gdpo"])
def test_another_estimator_than_the_demos_needs_no_other_setting(estimator: str) -> None:
    assert load_config("demo").advantages.normalize
    changed = load_config("demo", [f"advantages.estimator={estimator}"])
    assert (changed.advantages.estimator, changed.advantages.normalize) == (estimator, None)
    told = refused("demo", f"advantages.estimator={estimator}", "advantages.normalize=true")
    assert "only grpo has it" in told
