from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec
import pytest

from sc_core.errors import ConfigError, DataFailure
from sc_ray.tasks import Task, exact_match, hold_out, larger_digit, load_jsonl, load_reward
from sc_ray.tasks.arithmetic import right_digit
from sc_ray.tokenizer import Tokenizer

# built in ------------------------------------------------------------------------------


def test_larger_digit_asks_every_question_once_and_knows_the_answer() -> None:
    task = larger_digit()
    assert len({item["prompt"] for item in task.prompts}) == len(task.prompts) == 100
    for item in task.prompts:
        left, right = item["prompt"].removesuffix("=").split(",")
        assert item["answer"] == str(max(int(left), int(right)))


def test_larger_digit_mixes_its_questions_by_the_seed_alone() -> None:
    random.seed(1)
    first = larger_digit(seed=3).prompts
    random.seed(2)
    assert larger_digit(seed=3).prompts == first
    assert larger_digit(seed=4).prompts != first
    assert len({item["prompt"][0] for item in first[:16]}) > 3  # not sorted: a batch is mixed


@pytest.mark.parametrize(
    ("completion", "reward"), [("7", 1.0), ("77", 0.5), ("7<pad>", 0.5), ("3", 0.0), ("", 0.0)]
)
def test_only_the_answer_alone_earns_a_whole_point(completion: str, reward: float) -> None:
    assert right_digit("3,7=", completion, "7") == reward


def test_the_alphabet_of_a_task_encodes_all_of_it() -> None:
    task = larger_digit()
    assert task.alphabet() == ",0123456789="
    tokenizer = Tokenizer.of_characters(task.alphabet())
    for item in task.prompts:
        assert len(tokenizer.encode(item["prompt"] + item["answer"])) == 5


def test_what_is_held_out_is_not_trained_on() -> None:
    whole, task = larger_digit(seed=3), hold_out(larger_digit(seed=3), 20)
    assert [*task.prompts, *task.held_out] == list(whole.prompts)
    assert len(task.held_out) == 20
    assert task.alphabet() == whole.alphabet()
    sums = msgspec.structs.replace(whole, held_out=[{"prompt": "1+1", "answer": "2"}])
    assert sums.alphabet() == "+,0123456789="
    assert hold_out(whole, 0) == whole
    with pytest.raises(ConfigError, match=r"task\.held_out is 100, .* has 100 prompts: none would"):
        hold_out(whole, 100)


# reward --------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [-0.1, 1.5, float("nan"), None, "1"])
def test_a_reward_outside_its_range_is_told_with_its_prompt(reward: object) -> None:
    task = Task(
        name="odd",
        prompts=[{"prompt": "p", "answer": "a"}],
        reward=lambda prompt, completion, answer: reward,  # type: ignore[arg-type,return-value]
        max_new_tokens=1,
    )
    with pytest.raises(DataFailure, match=r"task odd for prompt 'p' and completion 'c'"):
        task.score(task.prompts[0], "c")


def test_the_reward_sees_prompt_completion_and_answer() -> None:
    seen: list[tuple[str, str, str]] = []

    def judge(prompt: str, completion: str, answer: str) -> float:
        seen.append((prompt, completion, answer))
        return 1

    task = Task(name="t", prompts=[], reward=judge, max_new_tokens=1)
    assert task.score({"prompt": "p", "answer": "a"}, "c") == 1.0
    assert seen == [("p", "c", "a")]


def test_exact_match_forgives_space_around_and_nothing_else() -> None:
    assert exact_match("p", " 5\n", "5") == 1.0
    assert exact_match("p", "5 5", "55") == 0.0


# JSONL ---------------------------------------------------------------------------------


def test_jsonl_lines_become_prompts_in_order(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_bytes(
        '{"prompt": "2+3=", "answer": "5", "level": 1}\r\n\n{"prompt": "ü", "answer": ""}'.encode()
    )
    task = load_jsonl(path)
    assert task.name == "sums" and task.reward is exact_match
    assert list(task.prompts) == [
        {"prompt": "2+3=", "answer": "5", "level": 1},
        {"prompt": "ü", "answer": ""},
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "2', "not a line of JSON"),
        (b'{"prompt": "\xff", "answer": "5"}', "not a line of JSON"),
        (b"[1, 2]", "an object was expected"),
        (b'{"prompt": "2+3=", "anwser": "5"}', "the key 'answer' is missing; found prompt, anwser"),
        (b'{"answer": "5"}', "the key 'prompt' is missing"),
        (b'{"prompt": "2+3=", "answer": 5}', "'answer' must be text, not 5"),
        (b'{"prompt": "", "answer": "5"}', "the prompt is empty"),
    ],
)
def test_a_wrong_line_is_told_with_file_and_number(tmp_path: Path, line: bytes, told: str) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_bytes(b'{"prompt": "1+1=", "answer": "2"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError) as refused:
        load_jsonl(path)
    assert f"{path}:3: " in str(refused.value) and told in str(refused.value)


def test_a_file_without_prompts_or_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    with pytest.raises(ConfigError, match=r"empty\.jsonl can't be read: No such file"):
        load_jsonl(path)
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl has no prompts"):
        load_jsonl(path)


# reward by name ------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "rewards_of_a_user"
    (tmp_path / f"{name}.py").write_text(
        "LIMIT = 3\ndef short_answer(prompt, completion, answer):\n    return 0.25\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_reward_is_found_by_name(module: str) -> None:
    assert load_reward(f"{module}:short_answer")("p", "c", "a") == 0.25


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("short_answer", "not of the form module:function"),
        (":f", "not of the form module:function"),
        ("m:", "not of the form module:function"),
        ("no_such_module_here:f", "importing no_such_module_here failed: ModuleNotFoundError"),
        ("broken_rewards:f", "No module named 'no_such_module_anywhere'"),
        ("rewards_of_a_user:short_anser", "did you mean short_answer?"),
        ("rewards_of_a_user:zzz", "rewards_of_a_user has no function zzz"),
        ("rewards_of_a_user:LIMIT", "LIMIT is a int, not a function"),
    ],
)
def test_a_reward_that_is_not_there_is_told_in_one_line(module: str, spec: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_reward(spec)
    assert told in str(refused.value) and repr(spec) in str(refused.value)
    assert "\n" not in str(refused.value)
