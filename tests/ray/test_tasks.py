from __future__ import annotations

import asyncio
import codecs
import math
import random
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sc_core.errors import ConfigError, DataFailure
from sc_ray.tasks import (
    Reply,
    Score,
    Task,
    exact_match,
    guess_digit,
    hold_out,
    larger_digit,
    load_environment,
    load_jsonl,
    load_reward,
    two_digit_sums,
)
from sc_ray.tasks.arithmetic import last_number, right_digit
from sc_ray.tasks.guess_digit import HigherOrLower
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


def test_sums_are_held_out_and_judged_by_their_last_number() -> None:
    task = two_digit_sums(seed=1)
    asked = {item["prompt"] for item in (*task.prompts, *task.held_out)}
    assert (len(task.prompts), len(task.held_out), len(asked)) == (8000, 100, 8100)
    item = task.held_out[0]
    left, right = (int(word) for word in item["prompt"][8:-1].split(" + "))
    assert item["answer"] == str(left + right)
    for completion, reward in (
        ("34 + 57 = 91.", 1.0),
        ("91", 1.0),
        ("911", 0.0),
        ("91, not 92", 0.0),
        ("no idea", 0.0),
    ):
        assert last_number("What is 34 + 57?", completion, "91") == reward


def test_a_digit_is_guessed_with_hints() -> None:
    game = HigherOrLower({"prompt": "2-7:", "answer": "5"})
    said = [game.respond(guess) for guess in ("4", "6", "5x", "5")]
    assert [reply.text for reply in said] == [">", "<", "?", None]
    assert [reply.reward for reply in said] == [0, 0, 0, pytest.approx(0.4)]
    assert HigherOrLower({"answer": "5"}).respond("5") == Reply(None, 1.0)
    assert HigherOrLower({"answer": "5"}).respond("\N{SUPERSCRIPT FIVE}") == Reply("?")


def test_every_game_can_be_won_and_the_replies_are_in_the_alphabet() -> None:
    task = guess_digit(seed=2)
    assert len({(item["prompt"], item["answer"]) for item in task.prompts}) == 210
    assert set("0123456789<>?-:") == set(task.alphabet())
    for item in task.prompts:
        low, high = (int(bound) for bound in item["prompt"][:-1].split("-"))
        assert low <= int(item["answer"]) <= high
        game, turns = HigherOrLower(item), 0
        while True:
            turns += 1
            reply = game.respond(str((low + high) // 2))
            if reply.text is None:
                break
            middle = (low + high) // 2
            low, high = (middle + 1, high) if reply.text == ">" else (low, middle - 1)
        assert turns <= task.max_turns


# reward --------------------------------------------------------------------------------


ITEM = {"prompt": "p", "answer": "a"}


def judged(reward: Any) -> Score:
    """What a task with this reward function gives for completion `c`."""
    task = Task(name="odd", prompts=[ITEM], reward=reward, max_new_tokens=1)
    text, score = asyncio.run(task.respond(task.episode(ITEM), ITEM, "c"))
    assert text is None
    return score


@pytest.mark.parametrize("reward", [float("inf"), 1e39, float("nan"), None, "1"])
def test_a_reward_that_is_no_finite_number_is_told_with_its_prompt(reward: object) -> None:
    task = Task(
        name="odd",
        prompts=[{"prompt": "p", "answer": "a"}],
        reward=lambda prompt, completion, answer: reward,  # type: ignore[arg-type,return-value]
        max_new_tokens=1,
    )
    with pytest.raises(DataFailure, match=r"task odd for prompt 'p' and completion 'c'"):
        task.score(task.prompts[0], "c")
    with pytest.raises(DataFailure, match=r"task odd for prompt 'p' and completion 'c'"):
        judged(lambda *asked: reward)


@pytest.mark.parametrize(
    "number",
    [np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25), Fraction(1, 4)],
)
def test_a_reward_is_any_kind_of_number(number: Any) -> None:
    assert judged(lambda *asked: number) == Score(0.25)
    assert judged(lambda *asked: {"a": number, "b": np.int64(2)}).components == {"a": 0.25, "b": 2}
    assert judged(lambda *asked: np.bool_(True)) == judged(lambda *asked: True) == Score(1.0)


def test_a_reward_may_be_below_zero_and_above_one() -> None:
    assert judged(lambda *asked: -1.5).reward == -1.5
    assert judged(lambda *asked: 20).reward == 20.0


@pytest.mark.parametrize(
    "given", [np.array([0.5, 0.5]), torch.ones(2), np.float32("nan"), 0.5j, 10**400, [0.5]]
)
def test_several_numbers_are_no_reward(given: Any) -> None:
    for answer in (given, {"a": given}):
        with pytest.raises(DataFailure, match="the reward of task odd"):
            judged(lambda *asked, answer=answer: answer)


def test_a_reward_may_have_components() -> None:
    parts = {"right": 1.0, "brief": -0.25}
    assert judged(lambda *asked: parts) == Score(0.75, {"brief": -0.25, "right": 1.0})
    assert list(judged(lambda *asked: parts).components) == ["brief", "right"]
    whole = judged(lambda *asked: {**parts, "reward": 0.5})
    assert whole == Score(0.5, {"brief": -0.25, "right": 1.0})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"right": float("inf")}, "has inf under 'right'; it must be a finite number"),
        ({"right": None}, "has None under 'right'"),
        ({"right": 1e39}, "has 1e[+]39 under 'right'"),  # which float32 has not
        ({1: 0.5}, "has 0.5 under 1"),
        ({}, "names no component"),
        ({"reward": 1.0}, "names no component"),
    ],
)
def test_components_that_are_none_are_refused(given: Any, told: str) -> None:
    with pytest.raises(DataFailure, match=told):
        judged(lambda *asked: given)


def test_a_reward_may_be_async() -> None:
    async def later(prompt: str, completion: str, answer: str) -> float:
        await asyncio.sleep(0)
        return 0.25

    assert judged(later) == Score(0.25)
    task = Task(name="odd", prompts=[ITEM], reward=later, max_new_tokens=1)
    with pytest.raises(DataFailure, match="is <coroutine object"):
        task.score(ITEM, "c")


def test_the_reward_of_a_conversation_sees_its_last_message() -> None:
    item = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "answer": "a",
    }
    task = Task(
        name="chat",
        prompts=[item],
        reward=lambda p, c, a: (p, c, a) == ("u", "c", "a"),
        max_new_tokens=1,
    )
    assert task.score(item, "c") == 1.0
    assert task.alphabet() == "asu"


def test_a_task_has_a_reward_or_an_environment() -> None:
    for both in ({}, {"reward": exact_match, "environment": HigherOrLower}):
        with pytest.raises(ConfigError, match="needs a reward function or an environment"):
            Task(name="t", prompts=[], max_new_tokens=1, **both)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"task\.max_turns is 0"):
        Task(name="t", prompts=[], reward=exact_match, max_new_tokens=1, max_turns=0)


def test_what_an_environment_answers_is_checked() -> None:
    class Odd:
        def __init__(self, item: Any) -> None:
            self.answers = iter(["", Reply(3), Reply("on", math.inf)])  # type: ignore[arg-type]

        def respond(self, completion: str) -> Any:
            return next(self.answers)

    task = Task(name="odd", prompts=[ITEM], environment=Odd, max_new_tokens=1)
    odd = task.episode(ITEM)
    for told in ("answered '' to 'c'; it must answer with a Reply", "answered Reply", "is inf"):
        with pytest.raises(DataFailure, match=told):
            asyncio.run(task.respond(odd, ITEM, "c"))


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
    assert load_jsonl(path, reward=right_digit).reward is right_digit
    assert list(task.prompts) == [
        {"prompt": "2+3=", "answer": "5", "level": 1},
        {"prompt": "ü", "answer": ""},
    ]


def test_a_line_may_hold_messages_and_an_environment_needs_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "hello"}], "answer": "a"}
    path.write_bytes(msgspec.json.encode(chat) + b'\n{"prompt": "2-7:", "secret": 5}')
    with pytest.raises(ConfigError, match=r"chats\.jsonl:2: the key 'answer' is missing"):
        load_jsonl(path)
    task = load_jsonl(path, environment=HigherOrLower)
    assert list(task.prompts) == [chat, {"prompt": "2-7:", "secret": 5}]
    assert task.reward is None and task.environment is HigherOrLower


def test_a_file_may_begin_with_a_mark_and_have_lines_as_on_windows(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"prompt": "1", "answer": "2"}\r\n\r\n')
    assert load_jsonl(path).prompts == ({"prompt": "1", "answer": "2"},)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"messages": "hi", "answer": ""}', "'messages' must be a list of messages, not 'hi'"),
        (b'{"messages": [], "answer": ""}', "'messages' must be a list of messages"),
        (b'{"messages": [{"role": "user"}], "answer": ""}', "a message has a 'role' and a"),
        (b'{"messages": [{"role": "u", "content": ""}], "prompt": "p", "answer": ""}', "both"),
        (b'{"messages": [{"role": "user", "content": "p"}]}', "the key 'answer' is missing"),
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
        "class Game:\n    pass\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "script_of_a_user.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_reward_is_found_by_name(module: str) -> None:
    assert load_reward(f"{module}:short_answer")("p", "c", "a") == 0.25
    assert load_environment(f"{module}:Game").__name__ == "Game"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"task\.environment 'a:b': importing a failed"):
        load_environment("a:b")
    with pytest.raises(ConfigError, match="has no Class Gane; did you mean Game"):
        load_environment(f"{module}:Gane")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("short_answer", "not of the form module:function"),
        (":f", "not of the form module:function"),
        ("m:", "not of the form module:function"),
        ("no_such_module_here:f", "importing no_such_module_here failed: ModuleNotFoundError"),
        ("broken_rewards:f", "No module named 'no_such_module_anywhere'"),
        ("script_of_a_user:f", "importing script_of_a_user failed: SystemExit: 0"),
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
