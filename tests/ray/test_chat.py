"""Prompts and replies in the chat template of a pretrained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Pipeline
from transformers import LlamaConfig, PreTrainedTokenizerFast

from sc_core.errors import ConfigError, DataFailure, RestoreError
from sc_core.records import Prompt, group_id
from sc_ray import pretrained
from sc_ray.demo_pretrained import before_and_after
from sc_ray.generation import rollout_row
from sc_ray.generation.worker import GenerationSpec, GenerationWorker
from sc_ray.model import ModelConfig, build_model, save_weights
from sc_ray.phrasing import Phrasing
from sc_ray.prepared import Prepared
from sc_ray.settings import TrainConfig, load_config
from sc_ray.tasks import Reply, Task
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.policy import Policy

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe good<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = "{% for m in messages[-1:] %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
DEAF = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}\n{% endfor %}"
STRICT = "{{ raise_exception('no system here') if messages[0]['role'] == 'system' }}" + CHATML


SPACED = (  # as that of Llama 2
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }} <|im_end|>{% endif %}"
    "{% endfor %}"
)


def chat_tokenizer(
    directory: Path,
    template: str | None = CHATML,
    ends: Any = (1, 2),
    *,
    own_end: str | None = TEXT_END,
    start: bool = False,
) -> Tokenizer:
    """A byte-level tokenizer saved as a pretrained model's, and loaded from there.

    With `start`, each text begins with a token of its own.
    """
    specials = [TEXT_END, END, START]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*specials, *letters])}
    pipeline = Pipeline(models.BPE(vocabulary, []))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if start:
        pipeline.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, vocabulary[START])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=pipeline, eos_token=own_end, pad_token=TEXT_END, chat_template=template
    )
    made.save_pretrained(str(directory))
    if ends is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Tokenizer.load(directory)


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids)


# the tokenizer --------------------------------------------------------------------------


def test_a_prompt_is_a_users_message_and_the_model_is_asked_to_speak(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    plain = Phrasing(tokenizer=tokenizer, chat=True)
    asked = f"{START}user\n1+1?{END}\n{START}assistant\n"
    ids = plain.prompt_ids({"prompt": "1+1?"})
    assert text(tokenizer, ids) == f"{START}system\nBe good{END}\n{asked}"
    assert ids.count(tokenizer.vocabulary()[START]) == 3, "marks are tokens, not spelt out"
    told = Phrasing(tokenizer=tokenizer, chat=True, system_prompt="Add")
    assert (
        text(tokenizer, told.prompt_ids({"prompt": "1+1?"})) == f"{START}system\nAdd{END}\n{asked}"
    )
    conversation = [
        {"role": "system", "content": "own"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    shown = text(tokenizer, told.prompt_ids({"messages": conversation}))
    assert shown.startswith(f"{START}system\nown{END}\n{START}user\n1{END}\n{START}assistant\n2")


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_reply_continues_what_was_read_as_the_template_would_have_it(
    tmp_path: Path, cut_off: bool
) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    phrasing = Phrasing(tokenizer=tokenizer, chat=True)
    said = tokenizer.encode("é5" if cut_off else f"é5{END}")
    read = [*phrasing.prompt_ids({"prompt": "guess"}), *said]
    read += phrasing.reply_ids("lower", after_eos=not cut_off)
    whole = [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "é5"},
        {"role": "user", "content": "lower"},
    ]
    assert read == phrasing.prompt_ids({"messages": whole})


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_turn_ends_once_where_the_template_puts_a_space_before_its_end(
    tmp_path: Path, cut_off: bool
) -> None:
    tokenizer = chat_tokenizer(tmp_path, SPACED)
    ids = tokenizer.encode_reply(" lower", after_eos=not cut_off)
    assert text(tokenizer, ids) == f" {END}" * cut_off + "[INST] lower [/INST]"


def test_a_text_that_others_come_before_has_no_token_of_its_own_at_its_start(
    tmp_path: Path,
) -> None:
    phrasing = Phrasing(tokenizer=chat_tokenizer(tmp_path, start=True))
    assert text(phrasing.tokenizer, phrasing.prompt_ids({"prompt": "1"})) == f"{START}1"
    assert text(phrasing.tokenizer, phrasing.reply_ids("2", after_eos=False)) == "2"


def test_a_tokenizer_has_its_own_end_or_that_of_the_model_or_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, ends=1, own_end=None)
    tokenizer.save(tmp_path / "again")
    for each in (tokenizer, Tokenizer.load(tmp_path / "again")):
        assert each.eos_ids == {1} and each.eos_id == 1
    with pytest.raises(RestoreError, match="has no end-of-text token: no completion could end"):
        chat_tokenizer(tmp_path, ends=[], own_end=None)


def test_completions_end_at_the_tokenizers_end_token_and_at_those_of_the_model(
    tmp_path: Path,
) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    assert tokenizer.eos_ids == {0, 1, 2}
    again = tmp_path / "again"
    tokenizer.save(again)
    kept = Tokenizer.load(again)
    assert kept.eos_ids == {0, 1, 2} and kept.has_chat_template
    assert tokenizer.completion_text(tokenizer.encode(f"5{END}")) == "5"
    assert tokenizer.completion_text(tokenizer.encode(f"5{TEXT_END}")) == "5"
    assert chat_tokenizer(tmp_path, ends=1).eos_ids == {0, 1}
    assert chat_tokenizer(tmp_path, ends=None).eos_ids >= {0}
    (tmp_path / "generation_config.json").write_text("{}")
    assert Tokenizer.load(tmp_path).eos_ids == {0}


def test_a_template_that_refuses_or_forgets_is_told(tmp_path: Path) -> None:
    strict = Phrasing(tokenizer=chat_tokenizer(tmp_path, STRICT), chat=True, system_prompt="s")
    with pytest.raises(DataFailure, match=r"the chat template refuses .*no system here"):
        strict.prompt_ids({"prompt": "p"})
    for template in (FORGETFUL, DEAF):
        forgetful = Phrasing(tokenizer=chat_tokenizer(tmp_path, template), chat=True)
        with pytest.raises(DataFailure, match="can't be used for several turns"):
            forgetful.reply_ids("r", after_eos=True)


# settings -------------------------------------------------------------------------------


def config(*overrides: str) -> TrainConfig:
    return load_config("exact", overrides)


def test_a_pretrained_model_that_is_not_there_is_told_by_its_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(ConfigError, match=f"^policy.model.pretrained: .* no directory {gone}$"):
        Prepared.of(load_config("demo", [f"policy.model.pretrained={gone}"]))


def test_the_template_is_used_if_a_pretrained_model_brings_one(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "chat")
    chat_tokenizer(tmp_path / "plain", template=None)
    of = f"policy.model.pretrained={tmp_path}"
    assert Prepared.of(config(f"{of}/chat")).chat
    assert not Prepared.of(config(f"{of}/chat", "task.chat_template=false")).chat
    assert not Prepared.of(config(f"{of}/plain")).chat
    assert not Prepared.of(config()).chat
    assert Prepared.of(config(f"{of}/chat", "task.system_prompt=Add")).chat
    for overrides, told in (
        (["task.chat_template=true"], "the tokenizer has no chat template"),
        ([f"{of}/plain", "task.chat_template=true"], "the tokenizer has no chat template"),
        (["task.system_prompt=Add"], r"task\.system_prompt is set, and no chat template"),
    ):
        with pytest.raises(ConfigError, match=told):
            Prepared.of(config(*overrides))


def test_a_task_that_the_template_does_not_fit_is_refused(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "forgetful", FORGETFUL)
    chat_tokenizer(tmp_path / "strict", STRICT)
    of = f"policy.model.pretrained={tmp_path}"
    assert Prepared.of(config(f"{of}/forgetful")).chat
    with pytest.raises(ConfigError, match=r"task\.chat_template: .*for several turns"):
        Prepared.of(config(f"{of}/forgetful", "task.name=guess_digit"))
    with pytest.raises(ConfigError, match=r"task\.chat_template: .*no system here"):
        Prepared.of(config(f"{of}/strict", "task.system_prompt=s"))
    chat_tokenizer(tmp_path / "spaced", SPACED)
    assert Prepared.of(config(f"{of}/spaced", "task.system_prompt=''")).chat
    with pytest.raises(ConfigError, match=r"task\.system_prompt is set, and the chat template"):
        Prepared.of(config(f"{of}/spaced", "task.system_prompt=s"))
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}], "answer": "a"}\n')
    with pytest.raises(ConfigError, match="prompts of task chats are messages; they need"):
        Prepared.of(config(f"task.jsonl={path}"))
    assert Prepared.of(config(f"task.jsonl={path}", f"{of}/strict")).chat


def test_an_environment_is_for_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "games.jsonl"
    path.write_text('{"prompt": "2-7:", "answer": "5"}\n')
    game = "task.environment=sc_ray.tasks.guess_digit:HigherOrLower"
    prepared = Prepared.of(config(f"task.jsonl={path}", game, "task.characters=<>?"))
    assert (prepared.task.max_turns, prepared.task.reward) == (8, None)
    assert "<" in prepared.tokenizer.vocabulary()
    assert Prepared.of(config(f"task.jsonl={path}", game, "task.max_turns=3")).task.max_turns == 3
    reward = "task.reward=sc_ray.tasks.arithmetic:right_digit"
    for overrides, told in (
        ([game], r"its prompts are not: set task\.jsonl"),
        ([game, f"task.jsonl={path}", reward], "both set"),
        (["task.name=guess_digit", reward], "guess_digit has an environment"),
        (["task.max_turns=0"], r"task\.max_turns is 0"),
        (["task.val_temperature=-1"], r"task\.val_temperature is -1"),
    ):
        with pytest.raises(ConfigError, match=told):
            Prepared.of(config(*overrides))


# a worker -------------------------------------------------------------------------------


class Twice:
    def __init__(self, item: Any) -> None:
        self.turns = 0

    def respond(self, completion: str) -> Reply:
        self.turns += 1
        return Reply("again" if self.turns == 1 else None)


def test_a_worker_talks_in_the_template_and_the_trainer_agrees_on_logprobs(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    small = ModelConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2)
    model: Any = build_model(small, tokenizer, seed=0)
    model.config.save_pretrained(str(tmp_path))
    save_weights(model, tmp_path / "model.safetensors")
    task = Task(name="t", prompts=(), environment=Twice, max_turns=2, max_new_tokens=5)
    shape = ModelConfig(pretrained=str(tmp_path))
    spec = GenerationSpec(model=shape, tokenizer=tokenizer, task=task, chat=True, system_prompt="s")
    asked = Prompt(ordinal=0, group_id=group_id(0, 0), payload={"prompt": "1"})

    async def rollouts() -> Any:
        worker = GenerationWorker(spec)
        await worker.load_weights(tmp_path / "model.safetensors", 1)
        return await worker.rollouts(asked, range(4), 1)

    made = anyio.run(rollouts)
    phrasing = Phrasing(tokenizer=tokenizer, chat=True, system_prompt="s")
    assert made.prompt_ids == phrasing.prompt_ids({"prompt": "1"})
    for one in made.completions:
        ((start, end),) = one.replies
        ended = one.token_ids[start - 1] in tokenizer.eos_ids
        assert list(one.token_ids[start:end]) == phrasing.reply_ids("again", after_eos=ended)
    rows = [rollout_row(made.prompt_ids, one, reward=0) for one in made.completions]
    for row, found in zip(rows, Policy(shape, tokenizer).logprobs(rows), strict=True):
        assert (row["generation_logprobs"] - found).abs().max() <= 1e-4


# a pretrained model ---------------------------------------------------------------------


def test_the_configuration_of_a_converted_model_says_no_more_that_it_is_quantized(
    tmp_path: Path,
) -> None:
    read = LlamaConfig(hidden_size=64, num_attention_heads=2)
    read.quantization_config = {"quant_method": "gguf"}
    pretrained.clean_config(read, "LlamaForCausalLM").save_pretrained(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["architectures"] == ["LlamaForCausalLM"]


def test_a_model_is_converted_once_and_not_by_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('what it needs is not here')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pretrained, "PACKAGE", "package")
    monkeypatch.setattr(pretrained, "_NEEDED", ("no_such_package_1", "json"))
    directory = tmp_path / "models" / "tiny"
    with pytest.raises(ConfigError, match="^no_such_package_1 is not installed: pip install"):
        pretrained.smollm2(directory)
    monkeypatch.setattr(pretrained, "_NEEDED", ())
    with pytest.raises(ConfigError, match=r"holds no \.gguf file"):
        pretrained.smollm2(directory)
    (package / "tiny.gguf").touch()
    converted: list[str] = []

    def convert(source: Path, target: Path) -> None:
        (target / "config.json").touch()
        converted.append(source.name)
        if len(converted) == 1:
            raise KeyboardInterrupt
        (target / "model.safetensors").touch()

    monkeypatch.setattr(pretrained, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        pretrained.smollm2(directory)
    assert not directory.exists()
    assert pretrained.smollm2(directory) == pretrained.smollm2(directory) == directory
    assert converted == ["tiny.gguf"] * 2
    assert sorted(path.name for path in tmp_path.joinpath("models").iterdir()) == ["tiny"]


def test_the_demo_compares_the_first_evaluation_with_the_last(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 0, "val/reward": 0.04}\n{"step": 1, "train/reward": 0.5}\n'
        '{"step": 5, "val/reward": 0.1}\n{"step": 9, "val/reward": 0.5}\n{"step": 9, "va'
    )
    told = "held-out sums right: 4% before (step 0), 50% after (step 9)"
    assert before_and_after(metrics) == told
    metrics.write_text('{"step": 0, "val/reward": 0.04}\n')
    assert before_and_after(metrics) == "there are no two evaluations to compare"
