from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sc_core.errors import ConfigError, RestoreError, ScError
from sc_ray.estimators import GrpoAdvantages
from sc_ray.generation import Request, request_seed, rollout_row
from sc_ray.generation.torch_engine import TorchEngine
from sc_ray.losses import LossConfig, LossSums, step_metrics
from sc_ray.model import ModelConfig, build_model, read_tensors, write_tensors
from sc_ray.tasks import larger_digit
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.config import OptimizerConfig
from sc_ray.trainer.microbatch import Row
from sc_ray.trainer.policy import Policy

TASK = larger_digit()
TOKENIZER = Tokenizer.of_characters(TASK.alphabet())
SMALL = ModelConfig(hidden_size=64, intermediate_size=64, num_attention_heads=2)


def policy(*, model: ModelConfig = SMALL, seed: int = 0, **settings: Any) -> Policy:
    settings.setdefault("optimizer", OptimizerConfig(microbatch_rows=8))
    return Policy(model, TOKENIZER, seed=seed, **settings)


def made_up_rows(count: int = 24, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of many lengths, a little off-policy, some with tokens in the middle not sampled."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = 4 + number % 5
        mask = (torch.rand(length, generator=random) < 0.7).long()
        mask[0], mask[-1] = 0, 1
        generated = -3 * torch.rand(length, generator=random) * mask
        rows.append(
            {
                "input_ids": torch.randint(2, 14, (length,), generator=random),
                "completion_mask": mask,
                "generation_logprobs": generated,
                "prev_logprobs": generated + 0.1 * torch.randn(length, generator=random) * mask,
                "advantage": torch.randn(1, generator=random),
            }
        )
    return rows


def train(trained: Policy, rows: Sequence[Row], chunks: int = 1) -> dict[str, float]:
    size = -(-len(rows) // chunks)
    trained.begin_step()
    for start in range(0, len(rows), size):
        trained.accumulate(rows[start : start + size])
    return trained.finish_step()


def tensors_of(trained: Policy) -> dict[str, torch.Tensor]:
    """Everything that further training depends on."""
    snapshot = trained.snapshot()
    assert snapshot is not None
    return {**snapshot.weights, **snapshot.optimizer, "rng": snapshot.rng[0]}


def same(left: Policy, right: Policy) -> bool:
    one, other = tensors_of(left), tensors_of(right)
    assert one.keys() == other.keys()
    return left.steps == right.steps and all(torch.equal(one[name], other[name]) for name in one)


# log-probs -----------------------------------------------------------------------------


def test_logprobs_line_up_with_the_row_and_repeat_to_the_last_bit() -> None:
    trained = policy()
    rows = made_up_rows()
    found = trained.logprobs(rows)
    assert all(torch.equal(a, b) for a, b in zip(found, trained.logprobs(rows), strict=True))
    model = build_model(SMALL, TOKENIZER, seed=0)
    for row, logprobs in zip(rows, found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"][None]).logits[0]
        each = torch.log_softmax(logits[:-1], -1).gather(-1, row["input_ids"][1:, None])[:, 0]
        expected = torch.cat([torch.zeros(1), each]) * row["completion_mask"]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        assert logprobs.dtype == torch.float32 and not logprobs.requires_grad


def test_logprobs_are_those_the_engine_sampled_from_at_its_temperature() -> None:
    engine = TorchEngine(build_model(SMALL, TOKENIZER, seed=0), TOKENIZER)
    prompt_ids = TOKENIZER.encode("3,7=")
    asked = [
        Request(prompt_ids=prompt_ids, seed=seed, max_new_tokens=4, temperature=0.6)
        for seed in range(6)
    ]
    rows = [rollout_row(prompt_ids, got, reward=0) for got in engine.generate_batch(asked)]
    for row, found in zip(rows, policy(temperature=0.6).logprobs(rows), strict=True):
        torch.testing.assert_close(found, row["generation_logprobs"], atol=1e-5, rtol=0)


# a step --------------------------------------------------------------------------------


def test_a_step_moves_the_weights_and_tells_what_it_did() -> None:
    trained, untouched = policy(), policy()
    rows = made_up_rows()
    metrics = train(trained, rows)
    assert not same(trained, untouched) and trained.steps == 1
    tokens = sum(int(row["completion_mask"].sum()) for row in rows)
    assert metrics["tokens"] == tokens
    nothing = step_metrics(dict.fromkeys(LossSums._fields, 0.0))
    assert metrics.keys() == nothing.keys() | {"grad_norm", "lr"}
    assert metrics["grad_norm"] > 0
    assert 0 < metrics["clip_fraction"] < 1


def test_on_policy_rows_have_ratio_and_weight_one() -> None:
    trained = policy()
    rows = made_up_rows()
    for row, logprobs in zip(rows, trained.logprobs(rows), strict=True):
        row["prev_logprobs"] = row["generation_logprobs"] = logprobs
    metrics = train(trained, rows)
    assert metrics["probs_ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["sampling_importance_ratio_max"] == 1 and metrics["gen_kl_error"] == 0
    assert metrics["importance_weight"] == 1 and metrics["clip_fraction"] == 0
    weight = torch.cat([row["advantage"] * row["completion_mask"].sum() for row in rows]).sum()
    assert metrics["loss"] == pytest.approx(-float(weight) / metrics["tokens"], abs=1e-5)


def gradient_of(
    chunks: int, microbatch_rows: int, loss: LossConfig | None = None
) -> tuple[dict[str, float], torch.Tensor]:
    """What a first step does to the first moment: a tenth of the clipped gradient."""
    optimizer = OptimizerConfig(microbatch_rows=microbatch_rows, max_grad_norm=1e9)
    trained = policy(optimizer=optimizer, loss=loss)
    metrics = train(trained, made_up_rows(), chunks=chunks)
    moments = [v for name, v in trained.snapshot().optimizer.items() if name.endswith(".exp_avg")]
    return metrics, torch.cat([moment.flatten() for moment in moments]) * 10


LOSSES = {
    "over tokens": LossConfig(),
    "over sequences": LossConfig(token_level_loss=False),
    "by a constant": LossConfig(token_level_loss=False, loss_scale_factor=4),
    "gspo": LossConfig(token_level_loss=False, sequence_level_importance_ratios=True),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_how_a_step_is_split_changes_neither_gradient_nor_metrics(loss: LossConfig) -> None:
    metrics, gradient = gradient_of(chunks=1, microbatch_rows=100, loss=loss)
    assert float(gradient.norm()) == pytest.approx(metrics["grad_norm"], rel=1e-4)
    for chunks, microbatch_rows in ((1, 5), (3, 100), (24, 1), (5, 3)):
        other_metrics, other = gradient_of(chunks, microbatch_rows, loss)
        torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-4)
        assert other_metrics == pytest.approx(metrics, rel=1e-4)


def test_a_long_gradient_is_cut_to_its_bound() -> None:
    trained = policy(optimizer=OptimizerConfig(max_grad_norm=1e-3))
    metrics = train(trained, made_up_rows())
    moments = [v for name, v in trained.snapshot().optimizer.items() if name.endswith(".exp_avg")]
    assert metrics["grad_norm"] > 1e-2
    assert float(torch.nn.utils.get_total_norm(moments)) == pytest.approx(1e-4, rel=1e-3)


def test_the_loss_follows_its_settings() -> None:
    loose = LossConfig(
        ratio_clip_min=0.99, ratio_clip_max=100, truncated_importance_sampling_ratio=1e-3
    )
    metrics = train(policy(loss=loose), made_up_rows())
    assert metrics["clip_fraction"] == 0
    assert metrics["importance_weight"] == pytest.approx(1e-3, rel=1e-3)


def test_each_token_may_have_an_advantage_of_its_own() -> None:
    one, each, other = policy(), policy(), policy()
    rows = made_up_rows()
    spread = [{**r, "advantage": r["advantage"].expand(len(r["input_ids"]))} for r in rows]
    assert train(one, rows) == train(each, spread) and same(one, each)
    spread[0]["advantage"] = torch.arange(len(rows[0]["input_ids"])).float()
    assert train(other, spread)["loss"] != 0 and not same(one, other)
    other.begin_step()
    with pytest.raises(ScError, match="a row of 4 tokens has 3 advantages"):
        other.accumulate([{**rows[0], "advantage": torch.zeros(3)}])


def test_a_penalty_reads_the_reference() -> None:
    rows = made_up_rows()
    loss = LossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k2")
    far, near = policy(loss=loss), policy(loss=loss)
    untrained = policy().logprobs(rows)
    for row, logprobs in zip(rows, untrained, strict=True):
        row["reference_logprobs"] = logprobs - 0.5
    metrics = train(far, rows)
    assert metrics["kl_penalty"] == pytest.approx(0.125, rel=1e-4)
    for row, logprobs in zip(rows, untrained, strict=True):
        row["reference_logprobs"] = logprobs
    assert train(near, rows)["kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert not same(far, near)


def test_an_abandoned_step_leaves_no_trace() -> None:
    trained, straight = policy(), policy()
    train(trained, made_up_rows(seed=1))
    train(straight, made_up_rows(seed=1))
    before = torch.get_rng_state()
    trained.begin_step()
    trained.accumulate(made_up_rows(seed=2))
    trained.abandon_step()
    trained.abandon_step()  # there is none: nothing happens
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in trained._parameters.values())
    train(trained, made_up_rows(seed=3))
    train(straight, made_up_rows(seed=3))
    assert same(trained, straight)


def add_dropout(trained: Policy) -> None:
    for name, module in trained._model.named_modules():
        if name.endswith("self_attn"):
            module.attention_dropout = 0.5  # type: ignore[assignment]


def test_dropout_is_repeatable_abandonable_and_saved(tmp_path: Path) -> None:
    trained, straight, plain = policy(), policy(), policy()
    add_dropout(trained)
    add_dropout(straight)
    for each in (trained, straight, plain):
        torch.rand(1)  # global random numbers have no part in it
        train(each, made_up_rows(seed=1))
    assert same(trained, straight) and not same(trained, plain)
    fresh = tensors_of(policy())["rng"]
    assert not torch.equal(tensors_of(trained)["rng"], fresh)  # new ones each time
    trained.begin_step()
    trained.accumulate(made_up_rows(seed=2))
    trained.save(tmp_path)  # of the last finished step, whatever is open
    trained.abandon_step()
    loaded = policy(seed=9)
    add_dropout(loaded)
    loaded.load(tmp_path)
    for each in (trained, straight, loaded):
        train(each, made_up_rows(seed=3))
    assert same(trained, straight) and same(loaded, straight)


def test_log_probs_are_without_dropout_also_in_the_midst_of_a_step() -> None:
    trained, rows = policy(), made_up_rows()
    plain = trained.logprobs(rows)
    add_dropout(trained)
    trained.begin_step()
    trained.accumulate(rows)
    for found, expected in zip(trained.logprobs(rows), plain, strict=True):
        assert torch.equal(found, expected)


def test_calls_out_of_turn_are_refused() -> None:
    trained = policy()
    with pytest.raises(ScError, match="accumulate: no step is open"):
        trained.accumulate(made_up_rows())
    with pytest.raises(ScError, match="finish_step: no step is open"):
        trained.finish_step()
    trained.begin_step()
    with pytest.raises(ScError, match="a step is open"):
        trained.begin_step()
    trained.abandon_step()
    assert same(trained, policy())


@pytest.mark.parametrize("rows", [0, 3])
def test_a_step_without_a_token_to_learn_from_is_finished_and_moves_nothing(rows: int) -> None:
    trained, straight = policy(), policy()
    nothing = [
        {**row, "completion_mask": torch.zeros_like(row["completion_mask"])}
        for row in made_up_rows(rows)
    ]
    trained.begin_step()
    assert trained.accumulate(nothing) == {"loss": 0.0, "tokens": 0.0}
    metrics = trained.finish_step()
    assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0.0
    assert metrics.keys() == train(straight, made_up_rows()).keys()
    assert trained.steps == 1
    before, after = tensors_of(policy()), tensors_of(trained)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_step_of_zero_advantages_has_no_loss() -> None:
    rows = [{**row, "advantage": torch.zeros(1)} for row in made_up_rows()]
    metrics = train(policy(), rows)
    assert metrics["loss"] == metrics["grad_norm"] == 0.0 < metrics["tokens"]


@pytest.mark.parametrize("advantage", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(advantage: float) -> None:
    trained, straight = policy(), policy()
    rows = made_up_rows()
    rows[3]["advantage"] = torch.tensor([advantage])
    with pytest.raises(ScError, match="the gradient's norm"):
        train(trained, rows)
    train(trained, made_up_rows())
    train(straight, made_up_rows())
    assert same(trained, straight)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr", [0.0, -1.0, math.nan, math.inf]),
        ("beta1", [-0.1, 1.0, math.nan]),
        ("beta2", [-0.1, 1.0, math.nan]),
        ("eps", [-1e-8, math.nan, math.inf]),
        ("weight_decay", [-0.1, math.nan, math.inf]),
        ("max_grad_norm", [0.0, math.nan]),
        ("microbatch_rows", [0]),
    ],
)
def test_optimizer_settings_that_cannot_train_are_refused(name: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"optimizer\.{name} is {value}; it must be"):
            OptimizerConfig(**{name: value})  # type: ignore[arg-type]


def test_a_gradient_need_not_be_cut() -> None:
    uncut = policy(optimizer=OptimizerConfig(max_grad_norm=math.inf))
    assert train(uncut, made_up_rows())["grad_norm"] > 0
    assert all(bool(tensor.isfinite().all()) for tensor in tensors_of(uncut).values())


# data-parallel workers -----------------------------------------------------------------


class Ring:
    """What goes between threads that stand for workers."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._barrier = threading.Barrier(workers, timeout=60)
        self._given: dict[int, torch.Tensor] = {}

    def member(self, rank: int) -> Any:
        return Member(self, rank)

    def exchange(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        given = torch.stack([self._given[r] for r in sorted(self._given)])
        self._barrier.wait()
        return given


class Member:
    """In place of `Peers`, for what is replicated."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self._ring, self.rank, self.workers = ring, rank, ring.workers

    def sum(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._ring.exchange(self.rank, tensor).sum(0))

    def max(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._ring.exchange(self.rank, tensor).amax(0))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("shares", [(16, 8), (24, 0)])
def test_workers_with_a_share_each_become_what_one_with_all_becomes(
    shares: tuple[int, int], loss: LossConfig
) -> None:
    rows, single, ring = made_up_rows(), policy(loss=loss), Ring(2)
    expected = train(single, rows)
    workers = [
        policy(loss=loss, peers=ring.member(rank), sharding="replicated") for rank in range(2)
    ]
    parts = [rows[: shares[0]], rows[shares[0] :]]
    assert [len(part) for part in parts] == list(shares)
    metrics: dict[int, dict[str, float]] = {}

    for worker, part in zip(workers, parts, strict=True):  # one by one: threads share torch's RNG
        worker.begin_step()
        worker.accumulate(part)

    def work(rank: int) -> None:
        metrics[rank] = workers[rank].finish_step()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics[0] == metrics[1] == pytest.approx(expected, rel=1e-4)
    found, other = (worker._optimizer_tensors() for worker in workers)
    assert all(torch.equal(found[name], other[name]) for name in found)
    for name, tensor in single._optimizer_tensors().items():
        if name.endswith(".exp_avg"):
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-4, msg=name)


# disk ----------------------------------------------------------------------------------


def test_training_after_a_load_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    straight, loaded = policy(), policy(seed=7)
    for number in range(3):
        train(straight, made_up_rows(seed=number))
    straight.save(tmp_path)
    train(loaded, made_up_rows(seed=9))  # whatever it was
    loaded.begin_step()
    loaded.accumulate(made_up_rows(seed=9))
    loaded.load(tmp_path)
    assert same(loaded, straight) and loaded.steps == 3
    for number in range(3, 6):
        assert train(loaded, made_up_rows(seed=number)) == train(
            straight, made_up_rows(seed=number)
        )
    assert same(loaded, straight)
    for a, b in zip(
        loaded.logprobs(made_up_rows()), straight.logprobs(made_up_rows()), strict=True
    ):
        assert torch.equal(a, b)


def test_a_policy_that_never_trained_can_be_saved_too(tmp_path: Path) -> None:
    fresh, loaded = policy(seed=1), policy(seed=2)
    fresh.save(tmp_path)
    loaded.load(tmp_path)
    train(fresh, made_up_rows())
    train(loaded, made_up_rows())
    assert same(loaded, fresh)


def test_a_snapshot_is_not_moved_by_further_training(tmp_path: Path) -> None:
    trained, loaded = policy(), policy(seed=1)
    train(trained, made_up_rows(seed=1))
    snapshot = trained.snapshot()
    train(trained, made_up_rows(seed=2))
    snapshot.write(tmp_path)
    loaded.load(tmp_path)
    assert loaded.steps == 1 and not same(loaded, trained)
    train(loaded, made_up_rows(seed=2))
    assert same(loaded, trained)


def test_what_is_saved_is_no_pickle_and_hugging_face_reads_it(tmp_path: Path) -> None:
    trained = policy()
    train(trained, made_up_rows())
    trained.save(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert Tokenizer.load(tmp_path).vocabulary() == TOKENIZER.vocabulary()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(opened[name], v) for name, v in trained.snapshot().weights.items())


def test_engines_load_what_is_exported(tmp_path: Path) -> None:
    trained = policy()
    train(trained, made_up_rows())
    trained.export_weights(tmp_path / "w.safetensors")
    engine = TorchEngine(build_model(SMALL, TOKENIZER, seed=5), TOKENIZER)
    engine.load(tmp_path / "w.safetensors", 1)
    prompt_ids = TOKENIZER.encode("3,7=")
    row = rollout_row(prompt_ids, engine.generate(prompt_ids, 0, 4), reward=0)
    (found,) = trained.logprobs([row])
    torch.testing.assert_close(found, row["generation_logprobs"], atol=1e-5, rtol=0)


FILES = ("model.safetensors", "optimizer.safetensors", "optimizer.json", "tokenizer.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["remove", "cut"])
def test_a_damaged_save_is_refused_by_name(tmp_path: Path, name: str, harm: str) -> None:
    policy().save(tmp_path)
    path = tmp_path / name
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(RestoreError) as refused:
        policy().load(tmp_path)
    where = str(tmp_path) if name == "tokenizer.json" else str(path)
    assert where in str(refused.value)


def test_a_save_without_random_state_is_refused(tmp_path: Path) -> None:
    policy().save(tmp_path)
    path = tmp_path / "optimizer.safetensors"
    write_tensors({n: t for n, t in read_tensors(path).items() if n != "torch_rng"}, path)
    with pytest.raises(RestoreError, match=r"optimizer\.safetensors holds no torch_rng"):
        policy().load(tmp_path)


def test_a_save_of_another_run_is_refused(tmp_path: Path) -> None:
    policy(model=ModelConfig()).save(tmp_path / "wider")
    with pytest.raises(RestoreError, match="and the model's is"):
        policy().load(tmp_path / "wider")
    other = Tokenizer.of_characters("abcdefghijkl")
    Policy(SMALL, other).save(tmp_path / "letters")
    with pytest.raises(RestoreError, match="another vocabulary"):
        policy().load(tmp_path / "letters")
    policy().save(tmp_path / "newer")
    (tmp_path / "newer/optimizer.json").write_text('{"type":"adamw.v2","steps":3}')
    with pytest.raises(RestoreError, match=r"adamw\.v2"):
        policy().load(tmp_path / "newer")
    policy().save(tmp_path / "short")
    tensors = read_tensors(tmp_path / "short/optimizer.safetensors")
    del tensors["torch_rng"]
    write_tensors(tensors, tmp_path / "short/optimizer.safetensors")
    with pytest.raises(RestoreError, match="holds no torch_rng"):
        policy().load(tmp_path / "short")


# all of it together --------------------------------------------------------------------


def test_the_built_in_task_is_learnt_from_rollouts_one_version_old(tmp_path: Path) -> None:
    prompts, siblings, steps, weights = 16, 16, 30, tmp_path / "w.safetensors"
    trained = Policy(ModelConfig(), TOKENIZER, optimizer=OptimizerConfig(microbatch_rows=256))
    engine = TorchEngine(build_model(ModelConfig(), TOKENIZER, seed=0), TOKENIZER)

    def rollouts(step: int) -> list[dict[str, torch.Tensor]]:
        rows = []
        for ordinal in range(step * prompts, (step + 1) * prompts):
            item = TASK.prompts[ordinal % len(TASK.prompts)]
            asked = [
                Request(
                    prompt_ids=TOKENIZER.encode(item["prompt"]),
                    seed=request_seed(0, ordinal, sibling, engine.weight_version),
                    max_new_tokens=TASK.max_new_tokens,
                )
                for sibling in range(siblings)
            ]
            rows += [
                rollout_row(asked[0].prompt_ids, got, reward=TASK.score(item, got.text))
                for got in engine.generate_batch(asked)
            ]
        return rows

    rewards, weight = [], 1.0
    following = rollouts(0)
    for step in range(steps):
        rows, following = following, rollouts(step + 1)
        columns = {"reward": [row["reward"] for row in rows]}
        rewards.append(float(torch.cat(columns["reward"]).mean()))
        advantages = GrpoAdvantages().estimate(columns, [siblings] * prompts)["advantage"]
        for row, before, advantage in zip(rows, trained.logprobs(rows), advantages, strict=True):
            row.update(prev_logprobs=before, advantage=advantage)
        weight = train(trained, rows, chunks=4)["importance_weight"]
        trained.export_weights(weights)
        engine.load(weights, step + 1)
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > 0.5 and last > 3 * first, rewards
    assert weight != 1  # the rollouts were not the trained policy's own
