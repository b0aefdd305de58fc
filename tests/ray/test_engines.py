"""One suite for every engine, through the seam that a generation worker uses."""

from __future__ import annotations

import concurrent.futures
import copy
import importlib.util
import os
import signal
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sc_core.errors import ConfigError, DataFailure, RestoreError, WeightSyncError, WorkerDied
from sc_core.records import Prompt, group_id
from sc_ray.bridge import LoopThread
from sc_ray.broadcast import SendPlan, Sent
from sc_ray.generation import Completion, Request, rollout_row
from sc_ray.generation.engine import (
    GenerationSpec,
    VllmConfig,
    build_engine,
    check_engine,
)
from sc_ray.generation.worker import GenerationWorker
from sc_ray.model import (
    ModelConfig,
    build_model,
    configure_torch,
    save_weights,
    token_logprobs,
)
from sc_ray.tasks import Task
from sc_ray.tasks.arithmetic import right_digit
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.policy import Policy
from sc_ray.trainer.sender import WeightSender

TOKENIZER = Tokenizer.of_characters("0123456789,=")
MODEL = ModelConfig(
    hidden_size=64, intermediate_size=64, num_attention_heads=2, max_position_embeddings=128
)
PROMPTS = ("3,7=", "12,345=", "9=", "0,0,0,0=")
TOLERANCE = 1e-4
PATIENCE_S = 240.0  #: for an answer of a machine that is busy
STORE = {
    "worker_extension_cls": "store_backend.Extension",
    "weight_transfer_config": {"backend": "store"},
}
"""Have vLLM take weights through a store, in NCCL's place; see `store_backend`."""


def spec(engine: str) -> GenerationSpec:
    task = Task(name="larger_digit", prompts=(), reward=right_digit, max_new_tokens=4)
    return GenerationSpec(
        model=MODEL,
        tokenizer=TOKENIZER,
        task=task,
        run_id=f"test-{os.getpid()}",
        engine=engine,
        vllm=VllmConfig(kv_cache_gib=0.05, engine_args=STORE if engine == "vllm" else {}),
    )


def talkative(seed: int) -> torch.nn.Module:
    """A model that seldom ends a text, so that a load meets it in the middle of one."""
    model: Any = build_model(MODEL, TOKENIZER, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
        model.lm_head.weight[TOKENIZER.eos_id] = 0.0
    return model


class Driven:
    """An engine on a loop of its own, and the weights that it was given."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.models: dict[int, torch.nn.Module] = {}
        self.loop = LoopThread("engine")
        self.engine: Any = self.ask(self._build())

    async def _build(self) -> Any:
        engine = build_engine(spec(self.kind))
        await engine.start()
        return engine

    def begin(self, call: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return self.loop.submit(call)

    def ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.begin(call).result(PATIENCE_S)

    def write(self, model: torch.nn.Module) -> tuple[Path, int]:
        """New weights in a file, and the version that they shall have."""
        version = len(self.models)
        self.models[version] = model
        path = self.directory / f"{version}.safetensors"
        save_weights(model, path)
        return path, version

    def load(self, model: torch.nn.Module) -> int:
        path, version = self.write(model)
        assert self.ask(self.engine.load(path, version)) == version
        return version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.ask(self.engine.generate(requests))

    def off(self, version: int, asked: Request, got: Completion) -> list[float]:
        """By how much each log-prob differs from that of these weights."""
        ids = torch.tensor([[*asked.prompt_ids, *got.token_ids]])
        with torch.no_grad():
            found = token_logprobs(self.models[version], ids, temperature=asked.temperature)
        expected = found[0, len(asked.prompt_ids) :]
        return (torch.tensor(got.logprobs) - expected).abs().tolist()

    def made_by(self, version: int, asked: Request, got: Completion) -> bool:
        return max(self.off(version, asked, got)) <= TOLERANCE


@pytest.fixture(scope="module", params=["torch", "vllm"])
def driven(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driven]:
    configure_torch(threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM's import and torch warn of is not ours
        driven = Driven(request.param, tmp_path_factory.mktemp(request.param))
    driven.load(build_model(MODEL, TOKENIZER, seed=0))
    yield driven
    driven.engine.close()
    driven.loop.close()


def request(prompt: str, seed: int, max_new_tokens: int = 8, temperature: float = 1.0) -> Request:
    return Request(
        prompt_ids=TOKENIZER.encode(prompt),
        seed=seed,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )


def batch(temperature: float = 1.0) -> list[Request]:
    """Siblings of prompts of many lengths."""
    return [
        request(prompt, seed, max_new_tokens=1 + seed % 9, temperature=temperature)
        for seed in range(9)
        for prompt in PROMPTS
    ]


def long_ones(count: int = 24) -> list[Request]:
    return [request(PROMPTS[seed % 4], seed, max_new_tokens=100) for seed in range(count)]


# log-probs -----------------------------------------------------------------------------


def test_logprobs_are_the_trainers_also_after_weights_have_come(driven: Driven) -> None:
    for seed in (1, 2, 3):
        version = driven.load(build_model(MODEL, TOKENIZER, seed=seed))
        for temperature in (1.0, 0.7):
            requests = batch(temperature)
            for asked, got in zip(requests, driven.generate(requests), strict=True):
                assert got.weight_version == version
                assert max(driven.off(version, asked, got)) <= TOLERANCE
                assert not driven.made_by(version - 1, asked, got)


def test_logprobs_are_the_policys(driven: Driven) -> None:
    policy = Policy(MODEL, TOKENIZER, temperature=0.7, seed=5)
    path = driven.directory / "policy.safetensors"
    policy.export_weights(path)
    driven.models[len(driven.models)] = build_model(MODEL, TOKENIZER, seed=5)
    version = max(driven.models)
    assert driven.ask(driven.engine.load(path, version)) == version
    requests = batch(0.7)
    rows = [
        rollout_row(asked.prompt_ids, got, reward=0.0)
        for asked, got in zip(requests, driven.generate(requests), strict=True)
    ]
    for row, expected in zip(rows, policy.logprobs(rows), strict=True):
        assert (row["generation_logprobs"] - expected).abs().max() <= TOLERANCE


def test_completions_end_with_the_end_of_text_or_at_their_length(driven: Driven) -> None:
    driven.load(build_model(MODEL, TOKENIZER, seed=1))
    requests = [request(prompt, seed, 20) for seed in range(16) for prompt in PROMPTS]
    ends = set()
    for got in driven.generate(requests):
        ended = got.token_ids[-1] == TOKENIZER.eos_id
        assert TOKENIZER.eos_id not in got.token_ids[:-1]
        assert got.finish_reason == ("eos" if ended else "length")
        assert ended or len(got.token_ids) == 20
        assert len(got.logprobs) == len(got.token_ids)
        assert got.text == TOKENIZER.completion_text(got.token_ids)
        ends.add(got.finish_reason)
    assert ends == {"eos", "length"}


def test_greedy_takes_the_likeliest_token_and_is_sure_of_it(driven: Driven) -> None:
    version = driven.load(build_model(MODEL, TOKENIZER, seed=1))
    requests = [request(prompt, 0, 6, temperature=0.0) for prompt in PROMPTS]
    for asked, got in zip(requests, driven.generate(requests), strict=True):
        assert set(got.logprobs) == {0.0}
        ids = torch.tensor([[*asked.prompt_ids, *got.token_ids]])
        with torch.no_grad():
            logits = driven.models[version](input_ids=ids).logits[0, len(asked.prompt_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(got.token_ids)


def test_a_seed_gives_the_same_again_and_another_one_does_not(driven: Driven) -> None:
    requests = batch()
    first, second = driven.generate(requests), driven.generate(requests)
    others = [msgspec.structs.replace(asked, seed=asked.seed + 99) for asked in requests]
    if driven.kind == "torch":
        assert first == second
    assert [got.token_ids for got in first] == [got.token_ids for got in second]
    assert [got.token_ids for got in first] != [got.token_ids for got in driven.generate(others)]


def test_a_prompt_that_does_not_fit_is_refused_and_no_other(driven: Driven) -> None:
    for prompt_ids, fact in ([], "at least one token"), ([2] * 125, "125 tokens and 4 new ones"):
        unfit = Request(prompt_ids=prompt_ids, seed=0, max_new_tokens=4)
        with pytest.raises(DataFailure, match=fact):
            driven.generate([unfit])
    assert len(driven.generate([request("2," * 62, 0, 4)])) == 1


# weights -------------------------------------------------------------------------------


def test_a_file_that_does_not_fit_is_refused_and_what_is_there_goes_on(driven: Driven) -> None:
    version = driven.load(build_model(MODEL, TOKENIZER, seed=1))
    good = (driven.directory / f"{version}.safetensors").read_bytes()
    wider = msgspec.structs.replace(MODEL, intermediate_size=96)
    deeper = msgspec.structs.replace(MODEL, num_hidden_layers=3)

    def bad(name: str, content: bytes | torch.nn.Module) -> Path:
        path = driven.directory / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            save_weights(content, path)
        return path

    for path, error in (
        (driven.directory / "nowhere", WeightSyncError),
        (driven.directory, WeightSyncError),
        (bad("torn", good[:-100]), RestoreError),
        (bad("text", b"weights"), RestoreError),
        (bad("wider", build_model(wider, TOKENIZER, seed=1)), RestoreError),
        (bad("deeper", build_model(deeper, TOKENIZER, seed=1)), RestoreError),
        (bad("halves", build_model(MODEL, TOKENIZER, seed=1).half()), RestoreError),
    ):
        with pytest.raises(error):
            driven.ask(driven.engine.load(path, version + 1))
    driven.ask(driven.engine.check())
    requests = batch()
    for asked, got in zip(requests, driven.generate(requests), strict=True):
        assert got.weight_version == version
        assert driven.made_by(version, asked, got)


def test_requests_of_a_pause_wait_for_its_end_and_for_the_weights_that_came(
    driven: Driven,
) -> None:
    for mode in ("keep", "wait", "abort") if driven.kind == "vllm" else ("torch",):
        driven.engine.pause_mode = mode
        driven.ask(driven.engine.pause())
        asked = request(PROMPTS[0], 1)
        answer = driven.begin(driven.engine.generate([asked]))
        version = driven.load(build_model(MODEL, TOKENIZER, seed=1))
        time.sleep(0.2)  # enough to answer, if it did not wait
        assert not answer.done()
        driven.ask(driven.engine.check())
        driven.ask(driven.engine.resume())
        (got,) = answer.result(PATIENCE_S)
        assert got.weight_version == version
        assert driven.made_by(version, asked, got)


def meet(driven: Driven, *, calls: int = 2) -> list[tuple[Request, Completion]]:
    """Have weights come while requests run, until they did; returns what became of these."""
    before = driven.load(talkative(seed=1))
    for seed in range(2, 12):
        requests = long_ones()
        answers = [
            driven.begin(driven.engine.generate(requests[number::calls])) for number in range(calls)
        ]
        time.sleep(0.05 * (1 + seed % 4))
        path, version = driven.write(talkative(seed))
        running = not any(answer.done() for answer in answers)
        driven.ask(driven.engine.pause())
        assert driven.ask(driven.engine.load(path, version)) == version
        driven.ask(driven.engine.resume())
        found = [
            (asked, got)
            for number, answer in enumerate(answers)
            for asked, got in zip(requests[number::calls], answer.result(PATIENCE_S), strict=True)
        ]
        assert {got.weight_version for _, got in found} <= {before, version}
        if running:
            return found
        before = version
    pytest.fail("no load met a request")


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_no_sequence_mixes_versions_where_that_is_promised(driven: Driven, mode: str) -> None:
    driven.engine.pause_mode = mode
    found = meet(driven)
    newest = max(driven.models)
    for asked, got in found:
        makers = [v for v in (newest - 1, newest) if driven.made_by(v, asked, got)]
        assert makers == [got.weight_version]
    if driven.kind == "vllm":  # of those that ran, which had not finished before the pause
        expected = newest if mode == "abort" else newest - 1
        assert expected in {got.weight_version for _, got in found}


@pytest.mark.parametrize("driven", ["vllm"], indirect=True)
def test_a_sequence_that_was_kept_has_each_logprob_of_its_own_policy(driven: Driven) -> None:
    driven.engine.pause_mode = "keep"
    mixed = 0
    for asked, got in meet(driven):
        new = got.weight_version
        assert driven.off(new, asked, got)[-1] <= TOLERANCE, "stamped by its last token"
        if not driven.made_by(new, asked, got):
            old_off, new_off = driven.off(new - 1, asked, got), driven.off(new, asked, got)
            assert any(
                max(old_off[:turn] + new_off[turn:]) <= TOLERANCE
                for turn in range(1, len(got.token_ids))
            )
            mixed += 1
    assert mixed


def test_a_call_that_is_cancelled_holds_nothing(driven: Driven) -> None:
    driven.load(talkative(seed=1))
    answers = [driven.begin(driven.engine.generate(long_ones())) for _ in range(3)]
    time.sleep(0.05)
    for answer in answers:
        answer.cancel()
    driven.ask(driven.engine.pause())
    held = driven.begin(driven.engine.generate(long_ones()))
    held.cancel()
    driven.ask(driven.engine.resume())
    (got,) = driven.generate([request(PROMPTS[0], 1)])
    assert got.token_ids
    if driven.kind == "vllm":
        assert driven.engine._started.llm.get_num_unfinished_requests() == 0
    else:
        assert not driven.engine._waiting


# weights by broadcast -------------------------------------------------------------------


class Handle:
    """Calls a worker as the handle of its actor does."""

    def __init__(self, driven: Driven, worker: GenerationWorker) -> None:
        self._driven, self._worker = driven, worker

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            answer = self._driven.begin(getattr(self._worker, method)(*arguments))
            return SimpleNamespace(future=lambda: answer)

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize("driven", ["vllm"], indirect=True)
def test_logprobs_are_the_policys_after_a_broadcast(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    import store_backend  # it needs vLLM

    monkeypatch.setattr("sc_ray.generation.worker.build_engine", lambda spec: driven.engine)
    driven.engine.pause_mode = "wait"
    handle = Handle(driven, GenerationWorker(spec("vllm")))
    before = driven.load(build_model(MODEL, TOKENIZER, seed=1))
    driven.generate(batch())  # which fills the prefix cache
    policy = Policy(MODEL, TOKENIZER, seed=8)
    sender = WeightSender(policy, first=True, connect=store_backend.connect)

    def broadcast(version: int, group: int) -> Sent:
        driven.models[version] = copy.deepcopy(policy._model)
        return sender.send(
            SendPlan(
                version=version,
                group=group,
                engines={"a": handle},
                far=False,
                deadline_s=PATIENCE_S,
            )
        )

    refused = broadcast(before + 1, group=1)
    assert "an engine that is paused; it is not" in refused.failed["a"]
    for version, group in ((before + 1, 2), (before + 2, 2), (before + 3, 3)):
        driven.ask(driven.engine.pause())
        held = driven.begin(driven.engine.generate(batch()))
        assert broadcast(version, group) == Sent(steps=policy.steps, confirmed={"a": version})
        driven.ask(driven.engine.check())
        driven.ask(driven.engine.resume())
        for asked, got in zip(batch(), held.result(PATIENCE_S), strict=True):
            assert got.weight_version == version
            assert driven.made_by(version, asked, got)
            assert not driven.made_by(version - 1, asked, got)
        with torch.no_grad():
            for parameter in policy._parameters.values():
                parameter.mul_(1.5)
    version = driven.load(build_model(MODEL, TOKENIZER, seed=1))
    for asked, got in zip(batch(), driven.generate(batch()), strict=True):
        assert driven.made_by(version, asked, got), "and a file can still come"


# what a run's settings name ------------------------------------------------------------


class Echo:
    """An engine of somebody else's."""

    room = 100

    def __init__(self, spec: GenerationSpec) -> None:
        self.spec = spec

    async def start(self) -> None:
        pass

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [
            Completion(
                token_ids=[self.spec.tokenizer.eos_id],
                logprobs=[0.0],
                text="7",
                finish_reason="eos",
                weight_version=4,
            )
            for _ in requests
        ]


def test_a_class_of_ones_own_serves_a_worker() -> None:
    loop = LoopThread("worker")
    worker = GenerationWorker(spec(f"{__name__}:Echo"))
    prompt = Prompt(ordinal=0, group_id=group_id(0, 0), payload={"prompt": "3,7=", "answer": "7"})
    got = loop.submit(worker.rollouts(prompt, [0, 1], 4)).result(PATIENCE_S)
    assert list(got.rewards) == [1.0, 1.0]
    loop.close()


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("vlm", "did you mean vllm"),
        ("nowhere.at_all:Engine", "importing nowhere.at_all failed"),
        (f"{__name__}:Missing", "has no class Missing"),
    ],
)
def test_an_engine_that_is_not_there_is_refused(name: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        check_engine(name, batch_invariant=False)


def test_vllm_is_refused_where_it_is_not_or_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Callable[[str], object] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else there(name)
    )
    with pytest.raises(ConfigError, match="not installed: pip install"):
        check_engine("vllm", batch_invariant=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="promises no such thing"):
        check_engine("vllm", batch_invariant=True)


# the end; keep it last: no vLLM is left after it ----------------------------------------


@pytest.mark.parametrize("driven", ["vllm"], indirect=True)
def test_a_core_that_was_killed_is_noticed_by_all_who_ask(driven: Driven) -> None:
    driven.ask(driven.engine.check())
    running = driven.begin(driven.engine.generate(long_ones()))
    (core,) = driven.engine._started.llm.engine_core.resources.engine_manager.processes
    os.kill(core.pid, signal.SIGKILL)
    path, version = driven.write(talkative(seed=1))
    for call in (
        running,
        driven.begin(driven.engine.check()),
        driven.begin(driven.engine.pause()),
        driven.begin(driven.engine.load(path, version)),
        driven.begin(driven.engine.resume()),
        driven.begin(driven.engine.generate(batch())),  # also as one that is held by the pause
    ):
        with pytest.raises(WorkerDied, match="vLLM's engine died"):
            call.result(PATIENCE_S)
    driven.engine.close()
    assert not list(Path("/dev/shm").glob(f"*test-{os.getpid()}*"))
