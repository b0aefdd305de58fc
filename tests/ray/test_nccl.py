"""Weights from GPU to GPU. Nothing of this runs on a machine with fewer than two."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from sc_core.records import Prompt, group_id
from sc_ray.broadcast import SendPlan, Sent
from sc_ray.generation import rollout_row
from sc_ray.generation.engine import GenerationSpec
from sc_ray.generation.worker import GenerationActor
from sc_ray.model import ModelConfig
from sc_ray.tasks import Task
from sc_ray.tasks.arithmetic import right_digit
from sc_ray.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
TOKENIZER = Tokenizer.of_characters("0123456789,=")
MODEL = ModelConfig(hidden_size=128, num_attention_heads=2)
PATIENCE_S = 300


@ray.remote(num_cpus=1, num_gpus=1)
class Sender:
    """A trainer on a GPU of its own."""

    def __init__(self) -> None:
        from sc_ray.trainer.policy import Policy
        from sc_ray.trainer.sender import WeightSender

        self._policy = Policy(MODEL, TOKENIZER, seed=7, device="cuda")
        self._sender = WeightSender(self._policy, first=True)

    def change(self) -> None:
        with torch.no_grad():
            for weight in self._policy.weights().values():
                weight.mul_(1.5)

    def send(self, plan: SendPlan) -> Sent:
        return self._sender.send(plan)

    def logprobs(self, rows: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        return self._policy.logprobs(rows)


@pytest.fixture
def engine(local_ray: None) -> Iterator[Any]:
    spec = GenerationSpec(
        model=MODEL,
        tokenizer=TOKENIZER,
        task=Task(name="larger_digit", prompts=(), reward=right_digit, max_new_tokens=8),
        run_id="test-nccl",
        engine="vllm",
        weight_transfer="nccl",
    )
    actor = GenerationActor.options(num_gpus=1).remote(spec, "a")
    ray.get(actor.ready.remote(), timeout=PATIENCE_S)
    yield actor
    ray.kill(actor)


def plan(engine: Any, version: int, group: int, deadline_s: float = PATIENCE_S) -> SendPlan:
    return SendPlan(
        version=version, group=group, engines={"a": engine}, far=False, deadline_s=deadline_s
    )


def test_logprobs_are_the_policys_after_each_broadcast(engine: Any) -> None:
    sender = Sender.remote()
    for version, group in ((1, 1), (2, 1), (3, 2)):  # the last one in a group made anew
        ray.get(engine.pause.remote())
        sent = ray.get(sender.send.remote(plan(engine, version, group)), timeout=PATIENCE_S)
        assert sent == Sent(steps=0, confirmed={"a": version})
        ray.get(engine.resume.remote())
        prompt = Prompt(
            ordinal=0, group_id=group_id(0, 0), payload={"prompt": "3,7=", "answer": "7"}
        )
        made = ray.get(engine.rollouts.remote(prompt, list(range(8)), version), timeout=PATIENCE_S)
        rows = [rollout_row(made.prompt_ids, each, reward=0.0) for each in made.completions]
        expected = ray.get(sender.logprobs.remote(rows))
        for row, logprobs in zip(rows, expected, strict=True):
            assert (row["generation_logprobs"] - logprobs).abs().max() <= 1e-2
        ray.get(sender.change.remote())
    ray.kill(sender)


def test_an_engine_that_is_killed_costs_the_trainer_a_deadline_and_no_more(engine: Any) -> None:
    sender = Sender.remote()
    ray.get(engine.pause.remote())
    assert ray.get(sender.send.remote(plan(engine, 1, 1))).confirmed == {"a": 1}
    ray.kill(engine)
    sent = ray.get(sender.send.remote(plan(engine, 2, 1, deadline_s=20)), timeout=120)
    assert "a" in {**sent.failed, **sent.dead} and sent.confirmed == {}
    ray.kill(sender)
