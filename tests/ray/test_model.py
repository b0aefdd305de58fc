from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sc_core.errors import ConfigError, DataFailure, RestoreError
from sc_ray.model import (
    ModelConfig,
    build_model,
    load_weights,
    read_tensors,
    save_weights,
    token_logprobs,
    weights_of,
    write_tensors,
)
from sc_ray.tokenizer import Tokenizer

TOKENIZER = Tokenizer.of_characters("0123456789,=")
SMALL = ModelConfig(hidden_size=64, intermediate_size=64, num_attention_heads=2)
TIED = ModelConfig(
    hidden_size=64, intermediate_size=64, num_attention_heads=2, tie_word_embeddings=True
)
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def build(config: ModelConfig = SMALL, seed: int = 0) -> torch.nn.Module:
    return build_model(config, TOKENIZER, seed=seed)


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    one, other = left.state_dict(), right.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# fresh weights -------------------------------------------------------------------------


def test_seed_alone_decides_fresh_weights_and_global_randomness_is_left_alone() -> None:
    torch.manual_seed(5)
    first = build(seed=1)
    drawn = torch.rand(3)
    torch.manual_seed(6)
    second, other = build(seed=1), build(seed=2)
    torch.manual_seed(5)
    assert same(first, second) and not same(first, other)
    assert torch.equal(drawn, torch.rand(3))


def test_model_has_a_token_for_each_of_the_vocabulary() -> None:
    assert weights_of(build())[EMBEDDING].shape == (14, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": 100, "num_attention_heads": 3},
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        {"num_attention_heads": 0},
        {"num_key_value_heads": -2},
        {"hidden_size": 0},
        {"intermediate_size": 0},
        {"num_hidden_layers": -1},
        {"max_position_embeddings": 0},
        {"initializer_range": 0.0},
        {"initializer_range": float("nan")},
        {"initializer_range": float("inf")},
    ],
)
def test_numbers_that_no_model_has_are_refused_with_them(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        ModelConfig(**wrong)
    assert all(str(number) in str(refused.value) for number in wrong.values())


def test_padding_at_the_end_changes_no_logprob() -> None:
    model = build()
    ids = torch.tensor([TOKENIZER.encode("3,7=7")])
    padded = torch.nn.functional.pad(ids, (0, 3), value=TOKENIZER.pad_id)
    alone = token_logprobs(model, ids)
    beside = token_logprobs(model, padded)[:, :5]
    assert alone[0, 0] == 0 and (alone[0, 1:] < 0).all()
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)


def test_logprobs_are_those_of_the_next_token_at_the_temperature() -> None:
    model = build()
    ids = torch.tensor([[2, 3, 4]])
    logits = model(input_ids=ids).logits
    expected = torch.log_softmax(logits[0, 1] / 0.5, -1)[4]
    found = token_logprobs(model, ids, temperature=0.5)
    torch.testing.assert_close(found[0, 2], expected)


# weights on disk -----------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_weights_survive_a_round_trip(tmp_path: Path, config: ModelConfig) -> None:
    saved, loaded = build(config, seed=1), build(config, seed=2)
    save_weights(saved, tmp_path / "w.safetensors", fsync=True)
    load_weights(loaded, tmp_path / "w.safetensors")
    assert same(saved, loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_tied_weights_are_written_once_under_the_name_that_others_read(tmp_path: Path) -> None:
    save_weights(build(TIED), tmp_path / "tied")
    save_weights(build(SMALL), tmp_path / "untied")
    tied, untied = read_tensors(tmp_path / "tied"), read_tensors(tmp_path / "untied")
    assert EMBEDDING in tied and OUTPUT not in tied
    assert EMBEDDING in untied and OUTPUT in untied


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    path = tmp_path / "w.safetensors"
    save_weights(model, path)
    before = path.read_bytes()

    def torn(tensors: object, staged: Path, metadata: object) -> None:
        staged.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", torn)
    with pytest.raises(OSError, match="no space"):
        save_weights(build(seed=9), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_remove(path: Path) -> None:
    path.unlink()


def damage_other_shape(path: Path) -> None:
    save_weights(build(ModelConfig(hidden_size=32, num_attention_heads=2)), path)


def damage_missing_name(path: Path) -> None:
    tensors = read_tensors(path)
    del tensors["model.norm.weight"]
    write_tensors(tensors, path)


def damage_extra_name(path: Path) -> None:
    write_tensors({**read_tensors(path), "surplus": torch.zeros(1)}, path)


def damage_dtype(path: Path) -> None:
    write_tensors({name: value.double() for name, value in read_tensors(path).items()}, path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damage_cut, "can't be read as safetensors"),
        (damage_remove, "can't be read as safetensors"),
        (damage_other_shape, "model.embed_tokens.weight"),
        (damage_missing_name, "model.norm.weight is missing from"),
        (damage_extra_name, "surplus is not expected in"),
        (damage_dtype, "float64"),
    ],
)
def test_unfit_weights_are_refused_and_the_model_stays_as_it_was(
    tmp_path: Path, damage: object, told: str
) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(build(seed=1), path)
    assert callable(damage)
    damage(path)
    model, untouched = build(seed=2), build(seed=2)
    with pytest.raises(RestoreError, match=told) as refused:
        load_weights(model, path)
    assert str(path) in str(refused.value)
    assert same(model, untouched)


# pretrained ----------------------------------------------------------------------------


def save_as_pretrained(model: torch.nn.Module, directory: Path) -> None:
    model.config.save_pretrained(str(directory))  # type: ignore[union-attr,operator]
    save_weights(model, directory / "model.safetensors")


def test_a_saved_model_can_be_started_from_and_hugging_face_reads_it(tmp_path: Path) -> None:
    model = build(TIED, seed=3)
    save_as_pretrained(model, tmp_path)
    again = build(ModelConfig(pretrained=str(tmp_path)), seed=4)
    assert same(again, model)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_a_pretrained_model_that_is_not_there_or_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no causal LM in"):
        build(ModelConfig(pretrained=str(tmp_path / "nowhere")))
    save_as_pretrained(build(), tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="no causal LM in"):
        build(ModelConfig(pretrained=str(tmp_path)))
    weights.write_bytes(whole)
    with pytest.raises(ConfigError, match="has 14 tokens and the tokenizer 15"):
        build_model(
            ModelConfig(pretrained=str(tmp_path)),
            Tokenizer.of_characters("0123456789,=+"),
            seed=0,
        )


# tokenizer -----------------------------------------------------------------------------


def test_text_survives_encoding_and_a_round_trip_to_disk(tmp_path: Path) -> None:
    tokenizer = Tokenizer.of_characters("ab \n<>eosü")
    text = "ab  a\nü<eos>"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.vocabulary() == tokenizer.vocabulary()
    assert (loaded.pad_id, loaded.eos_id, loaded.vocab_size) == (0, 1, 12)
    assert loaded.encode(text) == ids and loaded.decode(ids) == text


def test_order_and_repetition_of_the_alphabet_do_not_matter() -> None:
    one, other = Tokenizer.of_characters("ba"), Tokenizer.of_characters("aab")
    assert one.vocabulary() == other.vocabulary() == {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}


def test_an_unknown_character_is_named_with_its_prompt(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    for tokenizer in (TOKENIZER, Tokenizer.load(tmp_path)):
        with pytest.raises(DataFailure) as refused:
            tokenizer.encode("3+7=")
        assert "'+'" in str(refused.value) and "'3+7='" in str(refused.value)
        assert "\n" not in str(refused.value)


def test_only_the_final_end_of_text_is_left_out_of_a_completion() -> None:
    seven = TOKENIZER.encode("7")
    assert TOKENIZER.completion_text([*seven, TOKENIZER.eos_id]) == "7"
    assert TOKENIZER.completion_text(seven) == "7"
    assert TOKENIZER.completion_text([TOKENIZER.eos_id]) == ""
    assert TOKENIZER.completion_text([*seven, TOKENIZER.pad_id]) == "7<pad>"
    assert TOKENIZER.completion_text([TOKENIZER.eos_id, *seven]) == "<eos>7"


@pytest.mark.parametrize("alphabet", [[], ["ab"], ["a", ""]])
def test_an_alphabet_that_is_none_is_refused(alphabet: list[str]) -> None:
    with pytest.raises(ConfigError, match="can't be made of"):
        Tokenizer.of_characters(alphabet)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="no tokenizer can be loaded from"):
        Tokenizer.load(tmp_path)
    Tokenizer.of_characters("a").save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        whole = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b"{}"
        for damaged in ("{", "", "[]", "null"):
            (tmp_path / name).write_text(damaged)
            with pytest.raises(RestoreError, match="no tokenizer can be loaded from"):
                Tokenizer.load(tmp_path)
        (tmp_path / name).write_bytes(whole)
    assert Tokenizer.load(tmp_path).vocab_size == 3
