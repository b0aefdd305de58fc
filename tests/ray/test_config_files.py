"""Files that change other ones, interpolation, `python -m sc_ray config`, and names of NeMo RL."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from sc_core.config import SamplerConfig
from sc_core.errors import ConfigError
from sc_ray.__main__ import DONE, WRONG_USAGE, main
from sc_ray.annotated import annotated, plain, type_text
from sc_ray.config_files import parse_yaml, yaml_value
from sc_ray.documented import class_doc, documented, field_docs
from sc_ray.elsewhere import ELSEWHERE
from sc_ray.run_directory import keep_config
from sc_ray.settings import TrainConfig, builtin_configs, load_config


def refused(source: str | Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(str(source), overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# parents ------------------------------------------------------------------------------


def test_a_file_changes_the_ones_that_its_defaults_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text("grpo: {seed: 3, max_num_steps: 5}\n")
    (tmp_path / "deep" / "child.yaml").write_text(
        "defaults: ../base.yaml\ngrpo:\n  max_num_steps: 7\n"
    )
    (tmp_path / "deep" / "grandchild.yaml").write_text(
        "defaults: [exact, child.yaml]\ngrpo: {num_prompts_per_step: 9}\n"
    )
    grpo = load_config(str(tmp_path / "deep" / "grandchild.yaml"), ["grpo.val_period=0"]).grpo
    assert (grpo.seed, grpo.max_num_steps, grpo.num_prompts_per_step) == (3, 7, 9)
    exact = load_config("exact")
    assert load_config(str(tmp_path / "deep" / "grandchild.yaml")).generation == exact.generation


def test_a_mistake_of_a_parent_is_reported_as_the_parents(tmp_path: Path) -> None:
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    child.write_text("defaults: base.yaml\ngrpo: {seed: 1}\n")
    base.write_text("grpo: {sed: 1}\n")
    assert refused(child) == f"{base}: unknown key grpo.sed; did you mean grpo.seed?"
    base.write_text("generation: {workers: 0}\n")
    assert refused(child, "grpo.seed=2").startswith(f"{base}: generation.workers is 0")
    assert load_config(str(child), ["generation.workers=2"]).generation.workers == 2
    base.write_text("[1\n")
    assert refused(child).startswith(f"{base}:2: not YAML")


def test_parents_that_are_not_there_or_go_in_a_circle(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("defaults: two.yaml\n")
    assert refused(one).startswith(f"{one}: defaults: there is no configuration {two}")
    two.write_text("defaults: one.yaml\n")
    assert f"{two}: defaults: {one} -> {two} -> {one} goes in a circle" == refused(one)
    one.write_text("defaults: 3\n")
    assert "defaults is the name of a file, or a list of such" in refused(one)
    one.write_text("defaults: [[two.yaml]]\n")
    assert "defaults is the name of a file, or a list of such" in refused(one)


# interpolation ------------------------------------------------------------------------


def test_a_value_can_be_that_of_another_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "async_rl:\n"
        "  max_inflight_prompts: ${grpo.num_prompts_per_step}\n"
        "task: {system_prompt: 'pay \\${5}'}\n"
    )
    config = load_config(str(file), ["grpo.num_prompts_per_step=5"])
    assert config.async_rl.max_inflight_prompts == 5
    assert config.task.system_prompt == "pay ${5}"


def test_a_value_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TASK", "two_digit_sums")
    monkeypatch.setenv("MY_SEED", "7")
    config = load_config(
        "demo", ["task.name=${oc.env:MY_TASK}", "grpo.seed=${oc.decode:${oc.env:MY_SEED}}"]
    )
    assert (config.task.name, config.grpo.seed) == ("two_digit_sums", 7)
    monkeypatch.delenv("MY_TASK")
    told = refused("demo", "task.name=${oc.env:MY_TASK}")
    assert told == "command line: task.name: Environment variable 'MY_TASK' not found"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("${grpo.sed}", "command line: grpo.seed: Interpolation key 'grpo.sed' not found"),
        ("${grpo.seed}", "command line: grpo.seed: "),
        ("${mul:2,3}", "command line: grpo.seed: Unsupported interpolation type mul"),
        ("'${grpo.'", "command line: grpo.seed: "),
        ("???", "command line: grpo.seed: "),
    ],
)
def test_an_interpolation_of_what_is_not_there(value: str, says: str) -> None:
    assert refused("demo", f"grpo.seed={value}").startswith(says)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("!!int many", "grpo.seed:1: not YAML: 'many' is no int"),
        ("!!bool maybe", "grpo.seed:1: not YAML: 'maybe' is no bool"),
        ("!!timestamp soon", "grpo.seed:1: not YAML: 'soon' is no timestamp"),
        ("9" * 5000, "grpo.seed:1: not YAML: '999"),
        ("&a [*a]", "grpo.seed: more than 40 levels deep, or part of itself"),
        ("[" * 3000, "grpo.seed: more than 40 levels deep, or part of itself"),
        (f"{'[' * 41}{']' * 41}", "grpo.seed: more than 40 levels deep, or part of itself"),
        ("08", "grpo.seed is '08'; it must be an int"),
    ],
)
def test_a_value_that_no_reader_can_make_is_refused_in_a_line(value: str, says: str) -> None:
    assert refused("demo", f"grpo.seed={value}").startswith(f"command line: {says}")


def test_forty_levels_are_merged() -> None:
    deep = f"{'{a: ' * 38}1{'}' * 38}"
    config = load_config("demo", [f"generation.vllm.engine_args={deep}"])
    assert str(config.generation.vllm.engine_args).count("{") == 38


def test_a_key_twice_whose_first_value_can_not_be_merged() -> None:
    key = "generation.vllm.engine_args"
    for value in ('{x: "${"}', "{null: 1}"):
        told = refused("demo", f"{key}={value}", f"{key}={{y: 1}}")
        assert told.startswith(f"command line: {key}: ")


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    assert refused("x" * 5000).startswith("there is no configuration xxx")
    (tmp_path / "child.yaml").write_text(f"defaults: {'x' * 5000}\n")
    assert "defaults: there is no configuration" in refused(tmp_path / "child.yaml")


def test_a_mapping_on_the_command_line_changes_the_keys_that_it_has() -> None:
    config = load_config("demo", ["grpo={seed: 3}", "grpo={val_period: 5}"])
    assert (config.grpo.seed, config.grpo.val_period) == (3, 5)
    assert config.grpo.num_prompts_per_step == load_config("demo").grpo.num_prompts_per_step


# what is printed ----------------------------------------------------------------------


def test_every_setting_is_documented() -> None:
    assert [path for path, text in documented(TrainConfig) if not text] == []


@pytest.mark.parametrize("name", builtin_configs())
def test_what_config_prints_loads_to_the_same_settings(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--config", name]) == DONE
    out = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(out)
    config = load_config(name)
    assert load_config(str(tmp_path / "printed.yaml")) == config
    (tmp_path / "plain.yaml").write_text(plain(config))
    assert load_config(str(tmp_path / "plain.yaml")) == config
    assert all(len(line) < 101 for line in out.splitlines() if line.lstrip().startswith("#"))


def test_it_prints_documentation_type_and_default() -> None:
    lines = annotated(load_config("demo", ["grpo.max_num_steps=7"])).splitlines()
    at = lines.index("  max_num_steps: 7  # int; default 100")
    assert lines[at - 1] == "  # training steps of the whole run, restarts included"
    at = lines.index("  on_stale_prompt: drop  # one of drop, requeue")
    assert lines[at - 1].startswith("  # ")
    assert "  seed: 0  # int" in lines


def test_a_mistake_is_told_by_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "grpo.sed=3"]) == WRONG_USAGE
    assert "did you mean grpo.seed?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value",
    ["10:00", "1e3", "no", "null", "${x}", r"\${x}", "a: b # c", "", "3", "é\n", "2020-01-01", "-"]
    + ["08", "010", "a\n\n  b\n", "a\x85b", "a\u2028 b", "\r", "${"],
)
def test_text_survives_being_printed(value: str, tmp_path: Path) -> None:
    config = load_config("demo", [])
    task = msgspec.structs.replace(config.task, system_prompt=value)
    wandb = msgspec.structs.replace(config.logger.wandb, tags=(value, value))
    logger = msgspec.structs.replace(config.logger, wandb=wandb)
    config = msgspec.structs.replace(config, task=task, logger=logger)
    printed = annotated(config)
    assert len(yaml_value(value).splitlines()) == 1
    (tmp_path / "printed.yaml").write_text(printed)
    assert load_config(str(tmp_path / "printed.yaml")) == config


def test_numbers_survive_being_printed() -> None:
    for value in (1e-5, 5e-4, 1e22, 3, True, None, [1.5, {"a": 1e-9}], {}):
        assert parse_yaml(yaml_value(value), "") == value


def test_types_in_words() -> None:
    assert type_text(tuple[float, ...] | None) == "list of number or null"
    kinds = {field.name: type_text(field.type) for field in msgspec.structs.fields(SamplerConfig)}
    assert kinds["target"] == "text or null"


def test_documentation_behind_below_and_of_a_base() -> None:
    class Base(msgspec.Struct):
        behind: int = 0  #: one
        nothing: int = 0  # not that

    class Derived(Base):
        below: str = "#: no"
        """Two
        lines."""

    assert field_docs(Derived) == {"behind": "one", "below": "Two\nlines."}


# names of NeMo RL ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("loss_fn.token_level_loss=true", "unknown key loss_fn.token_level_loss; use policy.loss."),
        ("loss_fn.new=1", "unknown key loss_fn; its keys are those of policy.loss"),
        ("loss_fn={a: 1, b: 2}", "unknown key loss_fn; its keys are those of policy.loss"),
        ("cluster.gpus_per_node=8", "unknown key cluster.gpus_per_node; policy.workers take"),
        ("policy.generation.temperature=1", "policy.generation.temperature; use task.temperature"),
        ("checkpointing.checkpoint_dir=x", "--out names RUN"),
        ("grpo.val_batch_size=3", "async_rl.max_inflight_prompts bounds them"),
        ("policy.generation.vllm_kwargs.a=3", "use generation.vllm.engine_args"),
        ("async_rl.max_trajectory_age_steps=2", "use async_rl.sampler.max_staleness_versions"),
        ("grpo.async_grpo={max_trajectory_age_steps: 2}", "is async_rl.sampler.max_staleness_v"),
        ("++grpo.max_num_steps=20", "'++grpo.max_num_steps=20': leave out ++, and write key="),
        ("+grpo.seed=20", "leave out +, and write"),
        ("~grpo.seed", "leave out ~, and write"),
        ("grpo.num_prompt_per_step=3", "did you mean grpo.num_prompts_per_step?"),
    ],
)
def test_a_key_of_nemo_rl_is_answered_with_what_there_is_instead(override: str, says: str) -> None:
    assert says in refused("demo", override)


def test_all_unknown_keys_of_a_file_are_answered_at_once(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("grpo: {sed: 1, max_rollout_turns: 3}\nloss_fn: {a: 1}\n")
    assert refused(str(file)) == (
        f"{file}: 3 unknown keys: (1) grpo.sed; did you mean grpo.seed?"
        " (2) grpo.max_rollout_turns; use task.max_turns"
        " (3) loss_fn; its keys are those of policy.loss"
    )
    file.write_text("grpo:\n" + "".join(f"  sed{n}: 1\n" for n in range(12)))
    assert refused(str(file)).endswith("(10) grpo.sed9; did you mean grpo.seed? and 2 more")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("grpo.max_num_steps=abc", "grpo.max_num_steps is 'abc'; it must be an int"),
        ("grpo.max_num_epochs=[1]", "grpo.max_num_epochs is [1]; it must be an int or null"),
        ("policy.optimizer.lr=high", "policy.optimizer.lr is 'high'; it must be a number"),
        ("grpo.val_at_end=1", "grpo.val_at_end is 1; it must be true or false"),
        ("task.name=7", "task.name is 7; it must be text"),
        ("policy=7", "policy is 7; it must be a mapping"),
        ("event_loop=curio", "event_loop is 'curio'; it is one of asyncio, uvloop, trio"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(override: str, says: str) -> None:
    assert refused("demo", override) == f"command line: {says}"


def test_a_section_is_described_once() -> None:
    lines = annotated(load_config("demo")).splitlines()
    at = lines.index("  sampler:")
    assert lines[at - 1] == f"  # {class_doc(SamplerConfig)}"
    assert lines[at - 2] == "async_rl:"


def test_the_answers_name_keys_that_exist_for_keys_that_do_not() -> None:
    here = {path for path, _ in documented(TrainConfig)}
    sections = "|".join(TrainConfig.__struct_fields__)
    assert not here & ELSEWHERE.keys()
    for answer in ELSEWHERE.values():
        for key in re.findall(rf"\b(?:{sections})(?:\.\w+)+", answer):
            assert key in here, answer


def test_the_names_that_a_nemo_rl_user_expects_are_taken_or_answered() -> None:
    names = {
        "async_rl": "sampler min_groups_for_streaming_train max_inflight_prompts"
        " max_buffered_rollouts recompute_kv_cache_after_weight_updates",
        "async_rl.sampler": "name max_staleness_versions sample_freshest_first"
        " max_lookahead_versions target",
        "async_rl.rollout_failure": "max_infra_attempts_per_prompt max_data_attempts_per_prompt"
        " backoff_base_s max_backoff_s max_skipped_prompts max_consecutive_dropped_prompts"
        " on_dropped_prompt replacement_reserve_prompts",
        "async_rl.stall_watchdog": "interval_s stall_timeout_s stall_action",
        "async_rl.generation_fleet_health": "enabled probe_interval_s probe_timeout_s"
        " unhealthy_threshold healthy_threshold on_dead_shard max_restart_attempts_per_shard"
        " min_healthy_shards",
        "checkpointing": "enabled checkpoint_dir metric_name higher_is_better save_period"
        " keep_top_k ft_keep_latest_k ft_save_period checkpoint_must_save_by save_optimizer"
        " load_replay_buffer",
        "rollout_recovery": "default_granularity",
        "grpo": "num_prompts_per_step num_generations_per_prompt max_num_steps max_num_epochs seed"
        " val_period val_at_start val_at_end max_val_samples overlong_filtering",
    }
    here = {path for path, _ in documented(TrainConfig)} | ELSEWHERE.keys()
    for section, keys in names.items():
        assert {f"{section}.{key}" for key in keys.split()} <= here


# what is kept -------------------------------------------------------------------------


def test_the_settings_of_a_start_are_kept_and_those_of_earlier_ones(tmp_path: Path) -> None:
    for text in ("a", "a", "b", "b", "c"):
        keep_config(tmp_path, text)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"config.yaml": "c", "config.1.yaml": "a", "config.2.yaml": "b"}
