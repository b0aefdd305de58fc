from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sc_core.errors import ConfigError, DataFailure, RestoreError
from sc_ray.generation import Completion, Request, request_seed, rollout_row
from sc_ray.generation.torch_engine import TorchEngine, _Draft, _draw
from sc_ray.model import ModelConfig, build_model, save_weights, token_logprobs
from sc_ray.tokenizer import Tokenizer

TOKENIZER = Tokenizer.of_characters("0123456789,=")
CONFIG = ModelConfig(
    hidden_size=64, intermediate_size=64, num_attention_heads=2, max_position_embeddings=24
)
PROMPTS = ("3,7=", "12,345=", "9=", "0,0,0,0=")


def build(seed: int = 0) -> torch.nn.Module:
    return build_model(CONFIG, TOKENIZER, seed=seed)


def engine(*, batch_invariant: bool, seed: int = 0) -> TorchEngine:
    return TorchEngine(build(seed), TOKENIZER, batch_invariant=batch_invariant)


def request(prompt: str, seed: int, max_new_tokens: int = 8, temperature: float = 1.0) -> Request:
    return Request(
        prompt_ids=TOKENIZER.encode(prompt),
        seed=seed,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )


def mixed_requests() -> list[Request]:
    """Prompts and completions of many lengths, with siblings, at several temperatures."""
    return [
        request(prompt, seed, max_new_tokens=1 + seed % 9, temperature=(0.7, 1.0, 1.8)[seed % 3])
        for seed in range(12)
        for prompt in PROMPTS
    ]


def logprobs_in_one_forward(model: torch.nn.Module, asked: Request, got: Completion) -> list[float]:
    ids = torch.tensor([[*asked.prompt_ids, *got.token_ids]])
    with torch.no_grad():
        found = token_logprobs(model, ids, temperature=asked.temperature)
    return found[0, len(asked.prompt_ids) :].tolist()


# sampling ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logprobs_are_those_of_one_forward_over_the_whole(batch_invariant: bool) -> None:
    requests = mixed_requests()
    for asked, got in zip(
        requests, engine(batch_invariant=batch_invariant).generate_batch(requests), strict=True
    ):
        expected = logprobs_in_one_forward(build(), asked, got)
        assert list(got.logprobs) == pytest.approx(expected, abs=1e-5)


def test_batch_invariant_completions_do_not_depend_on_company_to_the_last_bit() -> None:
    requests = mixed_requests()
    together = engine(batch_invariant=True).generate_batch(requests)
    backwards = engine(batch_invariant=True).generate_batch(requests[::-1])[::-1]
    alone = [engine(batch_invariant=True).generate_batch([asked])[0] for asked in requests]
    assert together == backwards == alone
    assert len({tuple(got.token_ids) for got in together}) > len(requests) / 2


def test_both_ways_of_running_draw_the_same_tokens() -> None:
    requests = mixed_requests()
    exact = engine(batch_invariant=True).generate_batch(requests)
    fast = engine(batch_invariant=False).generate_batch(requests)
    assert [got.token_ids for got in fast] == [got.token_ids for got in exact]


def test_global_randomness_is_neither_used_nor_changed() -> None:
    torch.manual_seed(1)
    first = engine(batch_invariant=False).generate_batch(mixed_requests())
    torch.manual_seed(2)
    before = torch.get_rng_state()
    running = engine(batch_invariant=False)
    assert running.generate_batch(mixed_requests()) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    running = engine(batch_invariant=False)
    asked = [request("3,7=", seed, max_new_tokens=1) for seed in range(4000)]
    drawn = torch.tensor([got.token_ids[0] for got in running.generate_batch(asked)])
    ids = torch.tensor([TOKENIZER.encode("3,7=")])
    with torch.no_grad():
        expected = torch.softmax(build()(input_ids=ids).logits[0, -1], -1)
    found = torch.bincount(drawn, minlength=14) / len(drawn)
    assert (found - expected).abs().max() < 0.03  # over four standard deviations


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 2)])
def test_an_impossible_token_is_not_drawn_at_either_end(number: float, token: int) -> None:
    class Extreme(_Draft):
        def uniform(self) -> torch.Tensor:
            return torch.tensor(number, dtype=torch.float64)

    never = -torch.inf
    logits = torch.tensor([[never, 0.3, 0.3, never]])
    assert _draw(logits, [Extreme(request("3,7=", 0), TOKENIZER.eos_ids)])[0][0] == token


def test_temperature_zero_takes_the_likeliest_token_for_certain() -> None:
    for batch_invariant in (False, True):
        running = engine(batch_invariant=batch_invariant)
        got = [running.generate(TOKENIZER.encode("3,7="), seed, 4, 0.0) for seed in range(3)]
        assert got[0] == got[1] == got[2]
        assert set(got[0].logprobs) == {0.0}
        ids = torch.tensor([[*TOKENIZER.encode("3,7="), *got[0].token_ids]])
        with torch.no_grad():
            likeliest = build()(input_ids=ids).logits[0, 3:-1].argmax(-1)
        assert likeliest.tolist() == list(got[0].token_ids)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_completion_ends_with_the_end_of_text_or_at_its_length(batch_invariant: bool) -> None:
    ends = set()
    requests = [request("3,7=", seed, max_new_tokens=6) for seed in range(40)]
    for got in engine(batch_invariant=batch_invariant).generate_batch(requests):
        assert TOKENIZER.eos_id not in got.token_ids[:-1]
        ended = got.token_ids[-1] == TOKENIZER.eos_id
        assert got.finish_reason == ("eos" if ended else "length")
        assert ended or len(got.token_ids) == 6
        assert len(got.logprobs) == len(got.token_ids)
        assert got.text == TOKENIZER.decode(got.token_ids[:-1] if ended else got.token_ids)
        ends.add(got.finish_reason)
    assert ends == {"eos", "length"}


# the work shared between siblings ------------------------------------------------------


def count_forwards(running: TorchEngine) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    running._model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    return shapes


def test_siblings_share_the_prompts_forward_within_one_weight_version(tmp_path: Path) -> None:
    running = engine(batch_invariant=True)
    shapes = count_forwards(running)
    siblings = [request("3,7=", seed, max_new_tokens=1) for seed in range(8)]
    running.generate_batch(siblings)
    running.generate_batch(siblings)
    assert shapes == [(1, 4)]
    save_weights(build(), tmp_path / "w")
    running.load(tmp_path / "w", 1)
    running.generate_batch(siblings)
    assert shapes == [(1, 4), (1, 4)]


def test_rows_that_run_together_read_a_prompt_once_and_leave_when_finished() -> None:
    running = engine(batch_invariant=False)
    shapes = count_forwards(running)
    got = running.generate_batch(
        [request("3,7=", seed, max_new_tokens=1 + seed) for seed in range(6)]
    )
    lengths = [len(completion.token_ids) for completion in got]
    unfinished = [sum(length > read for length in lengths) for read in range(1, max(lengths))]
    assert shapes == [(1, 4), *((rows, 1) for rows in unfinished)]
    assert unfinished[0] > unfinished[-1]


def test_positions_of_a_padded_prompt_count_from_its_first_token() -> None:
    running = engine(batch_invariant=False)
    seen: list[list[list[int]]] = []
    running._model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    got = running.generate_batch([request(prompt, 0, 2) for prompt in ("9=", "3,7=")])
    assert [len(completion.token_ids) for completion in got] == [2, 2]
    assert seen == [[[0, 0, 0, 1], [0, 1, 2, 3]], [[2], [4]]]


def test_a_small_cache_forgets_and_changes_nothing() -> None:
    requests = mixed_requests()
    forgetful = TorchEngine(build(), TOKENIZER, batch_invariant=True, max_cached_tokens=10)
    assert forgetful.generate_batch(requests) == engine(batch_invariant=True).generate_batch(
        requests
    )
    assert sum(len(tokens) for _, tokens in forgetful._prefixes) == forgetful._cached_tokens <= 10


# weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_loaded_weights_are_used_at_once_and_named(tmp_path: Path, batch_invariant: bool) -> None:
    running = engine(batch_invariant=batch_invariant, seed=0)
    before = running.generate_batch(mixed_requests())
    save_weights(build(seed=1), tmp_path / "w")
    running.load(tmp_path / "w", 7)
    after = running.generate_batch(mixed_requests())
    fresh = engine(batch_invariant=batch_invariant, seed=1).generate_batch(mixed_requests())
    assert [got.logprobs for got in after] == [got.logprobs for got in fresh]
    assert {got.weight_version for got in before} == {0}
    assert {got.weight_version for got in after} == {7}


def test_weights_that_do_not_fit_leave_the_engine_as_it_was(tmp_path: Path) -> None:
    running = engine(batch_invariant=True)
    before = running.generate_batch(mixed_requests())
    with pytest.raises(RestoreError):
        running.load(tmp_path / "nowhere", 7)
    assert running.generate_batch(mixed_requests()) == before
    assert running.weight_version == 0


# what is refused -----------------------------------------------------------------------


def test_prompts_without_tokens_or_without_room_are_data_failures() -> None:
    running = engine(batch_invariant=False)
    with pytest.raises(DataFailure, match="at least one token"):
        running.generate([], 0, 1)
    with pytest.raises(DataFailure, match="21 tokens and 4 new ones exceed the model's 24"):
        running.generate([2] * 21, 0, 4)
    assert len(running.generate([2] * 20, 0, 4).token_ids) >= 1


def test_requests_for_nothing_or_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens = 0"):
        request("3,7=", 0, max_new_tokens=0)
    for temperature in (-0.5, float("nan")):
        with pytest.raises(ConfigError, match="temperature"):
            request("3,7=", 0, temperature=temperature)


def test_no_requests_give_no_completions() -> None:
    assert engine(batch_invariant=False).generate_batch([]) == []


# seeds and rows ------------------------------------------------------------------------


def test_seeds_differ_in_each_number_and_are_the_same_in_every_process() -> None:
    numbers = [(r, o, s, v) for r in range(3) for o in range(4) for s in range(4) for v in range(4)]
    seeds = {request_seed(*four) for four in numbers}
    assert len(seeds) == len(numbers)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, 2, 3, 4) == 6372624857121265686


def test_a_row_lines_up_tokens_mask_and_logprobs() -> None:
    prompt_ids = TOKENIZER.encode("3,7=")
    got = engine(batch_invariant=False).generate(prompt_ids, 3, 5)
    row = rollout_row(prompt_ids, got, reward=0.5)
    assert row["input_ids"].tolist() == [*prompt_ids, *got.token_ids]
    assert row["completion_mask"].tolist() == [0] * 4 + [1] * len(got.token_ids)
    assert row["generation_logprobs"].tolist() == [0.0] * 4 + list(got.logprobs)
    assert row["reward"].tolist() == [0.5] and row["reward"].dtype == torch.float32
    assert row["generation_logprobs"].dtype == torch.float32


def test_a_prompt_that_goes_on_from_a_completion_has_the_bits_it_would_have_alone() -> None:
    running = engine(batch_invariant=True)
    asked = request("3,7=", 0, max_new_tokens=6)
    said = running.generate_batch([asked])[0].token_ids
    longer = Request(prompt_ids=[*asked.prompt_ids, *said[:3]], seed=1, max_new_tokens=4)
    alone = engine(batch_invariant=True).generate_batch([longer])
    assert running.generate_batch([longer]) == alone
    assert len(running._prefixes) > len({tokens for _, tokens in running._prefixes})
