"""The command line on a real run in memory, saved to a real disk."""

from __future__ import annotations

import builtins
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from sc_core.__main__ import main
from sc_core.audit import audit_log, audit_run
from sc_core.config import ControllerConfig, decode
from sc_core.disk import LOCAL
from sc_core.events import read_events
from sc_core.manifest import open_manifest, seal_manifest
from sc_core.records import Prompt
from sc_core.replay import replay_run
from sc_core.testing import MemoryRun
from sc_core.verify import verify

Command = Callable[..., tuple[int, str]]

SETTINGS: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 3, "max_num_steps": 9},
    "async_rl": {"sampler": {"name": "weight_fifo"}},
    "checkpointing": {"save_period": 3},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after 6 steps and was resumed for 3 more."""
    directory = tmp_path_factory.mktemp("runs") / "demo"
    directory.mkdir()
    config = decode(SETTINGS, ControllerConfig)
    short = msgspec.structs.replace(config.grpo, max_num_steps=6)
    run = MemoryRun(
        msgspec.structs.replace(config, grpo=short),
        [{"question": number} for number in range(100)],
        directory=directory / "checkpoints",
    )
    run.disk = LOCAL  # type: ignore[assignment]
    run.start_life()
    anyio.run(run.run)
    run.config = config
    anyio.run(run.run)
    lines = msgspec.json.Encoder().encode_lines(run.log.events)
    (directory / "events.jsonl").write_bytes(lines)
    return directory


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy, to damage."""
    return Path(shutil.copytree(saved, tmp_path / "demo"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs one command; returns its exit status and what it printed."""
    monkeypatch.delenv("SC_BUNDLE_KEY", raising=False)

    def call(*arguments: object) -> tuple[int, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exc:
            status = int(exc.code or 0)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


# verify --------------------------------------------------------------------------------


def test_verify_of_a_good_bundle_is_one_line(run: Path, command: Command) -> None:
    bundle = run / "checkpoints" / "step_6"
    sizes = [file.stat().st_size for file in bundle.rglob("*") if file.is_file()]
    has = f"step 6, {len(sizes)} files, {sum(sizes):,} bytes, not signed"
    assert command("verify", bundle) == (0, f"{bundle}: ok; {has}\n")


def test_verify_says_whether_a_bundle_is_signed(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = run / "checkpoints" / "step_9"
    manifest = bundle / "MANIFEST.json"
    unsigned = open_manifest(manifest.read_bytes(), None, "step_9")
    manifest.write_bytes(seal_manifest(unsigned, b"k"))
    _, printed = command("verify", bundle)
    assert printed.endswith(" bytes, signature not checked (SC_BUNDLE_KEY is not set)\n")
    monkeypatch.setenv("SC_BUNDLE_KEY", "k")
    _, printed = command("verify", bundle)
    assert printed.endswith(" bytes, signed with SC_BUNDLE_KEY\n")


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_verify_of_a_run_looks_at_all_its_bundles(run: Path, command: Command, inside: str) -> None:
    status, printed = command("verify", run / inside)
    assert status == 0
    *each, last = printed.splitlines()
    assert [line.partition(": ok; ")[0][-6:] for line in each] == ["step_3", "step_6", "step_9"]
    assert last == "3 bundles: ok"


def test_verify_names_the_damaged_file(run: Path, command: Command) -> None:
    weights = run / "checkpoints" / "step_6" / "policy" / "weights.json"
    weights.write_bytes(weights.read_bytes()[::-1])
    status, printed = command("verify", run)
    assert status == 1
    lines = printed.splitlines()
    assert len(lines) == 5 and lines[2].startswith("  step_6: policy/weights.json: ")
    assert lines[-1] == (
        "3 bundles: 1 damaged; step_6: policy/weights.json: its content has changed"
    )
    status, printed = command("verify", run, "--json")
    result = json.loads(printed)
    assert (status, result["ok"]) == (1, False)
    assert [bundle["ok"] for bundle in result["bundles"]] == [True, False, True]
    assert result["bundles"][1]["error"].startswith("step_6: policy/weights.json: ")


def test_verify_tells_sizes_and_digest_as_json(run: Path, command: Command) -> None:
    status, printed = command("verify", run / "checkpoints" / "step_9", "--json")
    (bundle,) = json.loads(printed)["bundles"]
    info = run / "checkpoints" / "step_9" / "training_info.json"
    assert (status, bundle["step"], len(bundle["digest"])) == (0, 9, 64)
    assert bundle["parts"]["training_info.json"] == {"files": 1, "bytes": info.stat().st_size}
    assert bundle["parts"]["data_plane/"]["files"] == 2


def test_an_unsigned_bundle_is_refused_where_a_key_is_set(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SC_BUNDLE_KEY", "secret")
    for name in ("verify", "inspect"):
        status, printed = command(name, run / "checkpoints" / "step_9")
        assert status == 1
        assert "step_9: MANIFEST.json: is not signed" in printed


def test_a_run_without_bundles_has_nothing_to_verify(tmp_path: Path, command: Command) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("verify", "inspect"):
        assert command(name, tmp_path) == (1, f"{tmp_path} holds no checkpoints\n")


# inspect -------------------------------------------------------------------------------


def test_inspect_shows_the_newest_bundle_of_a_run(run: Path, command: Command) -> None:
    status, printed = command("inspect", run)
    facts = {line[2:22].strip(): line[22:] for line in printed.splitlines()[1:]}
    assert status == 0
    assert printed.startswith(f"{run / 'checkpoints' / 'step_9'}\n")
    assert facts["step"] == facts["weight version"] == "9"
    assert facts["sampler"] == "weight_fifo"
    cut = verify(run / "checkpoints" / "step_9").cut
    assert facts["prompts"] == (
        f"{cut.next_ordinal} pulled, 36 trained, 0 dropped, {cut.next_ordinal - 36} live"
    )
    versions = sorted(group.start_weight_version for group in cut.groups)
    assert facts["by start version"].startswith(
        f"{versions.count(versions[0])} of version {versions[0]}"
    )
    assert "by target step" not in facts
    assert max(map(len, printed.splitlines()[1:])) <= 100
    for name in ("data_plane/", "policy/", "training_info.json"):
        assert name in printed.partition("  bytes  ")[2]
    assert f"{len(cut.groups)} committed" in facts["ledger"]
    assert "MANIFEST.json" in facts["bytes"]
    assert facts["attempts"] == f"{len(cut.records)} at attempt 0"
    assert facts["failures"] == "0 infrastructure, 0 data, 0 stale"
    assert facts["kept"] == "by every rule"


def test_inspect_tells_all_of_it_as_json(run: Path, command: Command) -> None:
    status, printed = command("inspect", run, "--json")
    found = json.loads(printed)
    bundle = run / "checkpoints" / "step_9"
    cut = verify(bundle).cut
    assert (status, found["ok"], found["path"]) == (0, True, str(bundle))
    assert (found["step"], found["weight_version"], found["sampler"]) == (9, 9, "weight_fifo")
    assert sum(found["ledger"].values()) == found["prompts"]["live"] == len(cut.records)
    assert sum(found["by_start_version"].values()) == len(cut.groups)
    assert found["by_target_step"] == {}
    assert found["attempts"] == {"0": len(cut.records)}
    sizes = {
        file.relative_to(bundle).as_posix(): file.stat().st_size
        for file in bundle.rglob("*")
        if file.is_file()
    }
    assert found["files"] | {"MANIFEST.json": sizes["MANIFEST.json"]} == sizes
    assert sum(found["bytes"].values()) == sum(sizes.values())
    assert "resume" not in found and found["damaged"] == []


def test_inspect_counts_targets_attempts_and_failures(tmp_path: Path, command: Command) -> None:
    async def flaky(prompt: Prompt, sibling: int, version: int) -> None:
        if (prompt.ordinal, sibling) == (6, 0):
            if fails:
                fails.pop()
                raise ConnectionError("engine went away")
            failed_twice.set()
            for _ in range(200):  # in which prompt 5 is committed
                await anyio.lowlevel.checkpoint()
            assert run.controller is not None
            run.controller.stop()
        if prompt.ordinal == 5:
            await failed_twice.wait()
        if prompt.ordinal >= 6:
            await anyio.sleep_forever()

    fails = [1, 2]
    failed_twice = anyio.Event()
    config = decode(
        {
            "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2},
            "async_rl": {
                "sampler": {"name": "in_order", "max_lookahead_versions": 1},
                "rollout_failure": {"backoff_base_s": 0.01},
            },
            "checkpointing": {"ft_save_period": 1},
        },
        ControllerConfig,
    )
    run = MemoryRun(config, range(50), directory=tmp_path / "checkpoints", script=flaky)
    run.disk = LOCAL  # type: ignore[assignment]
    run.start_life()
    anyio.run(run.run)
    status, printed = command("inspect", tmp_path, "--json")
    found = json.loads(printed)
    assert (status, found["step"], found["kept"]) == (0, 1, "by ft_keep_latest_k alone")
    assert found["by_target_step"]["1"] == 4
    assert found["failures"] == {"infrastructure": 2, "data": 0, "stale": 0}
    assert found["attempts"]["2"] == 1
    assert found["ledger"]["committed"] == 2


def test_inspect_skips_a_damaged_bundle_as_a_resume_would(run: Path, command: Command) -> None:
    (run / "checkpoints" / "step_9" / "config.yaml").unlink()
    status, printed = command("inspect", run)
    assert status == 0
    assert printed.splitlines()[:2] == [
        "skipped: step_9: config.yaml: missing",
        str(run / "checkpoints" / "step_6"),
    ]
    status, printed = command("inspect", run, "--json")
    result = json.loads(printed)
    assert (status, result["step"], len(result["damaged"])) == (0, 6, 1)
    status, printed = command("inspect", run / "checkpoints" / "step_9")
    assert (status, printed) == (1, "step_9: config.yaml: missing\n")


def test_inspect_says_what_a_resume_would_do(run: Path, command: Command, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SETTINGS | {"policy": {"lr": 1.0}}))
    status, printed = command("inspect", run, "--config", config)
    assert status == 0
    assert f"a resume with {config}\n  goes on from step 9, weight version 9\n" in printed
    config.write_text(json.dumps(SETTINGS | {"grpo": {"num_generations_per_prompt": 5}}))
    status, printed = command("inspect", run, "--config", config)
    assert status == 1
    assert "  is refused: the checkpoint's groups have 3 siblings and " in printed
    status, printed = command("inspect", run, "--config", config, "--json")
    result = json.loads(printed)
    assert (status, result["ok"]) == (1, False)
    assert "num_generations_per_prompt is 5" in result["resume"]["refused"]


def test_inspect_reads_yaml_where_it_is_installed(
    run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml")
    config = tmp_path / "config.yaml"
    config.write_text("grpo:\n  num_prompts_per_step: 4\n  num_generations_per_prompt: 3\n")
    status, printed = command("inspect", run, "--config", config)
    assert status == 0
    assert "changes the sampler from weight_fifo to windowed" in printed
    own = run / "checkpoints" / "step_9" / "config.yaml"
    assert command("inspect", run, "--config", own)[0] == 0

    import_ = builtins.__import__

    def without_yaml(name: str, *args: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return import_(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    assert command("inspect", run, "--config", own)[0] == 0  # it is JSON, too
    status, printed = command("inspect", run, "--config", config)
    assert status == 2
    assert "reading YAML needs PyYAML: pip install pyyaml" in printed


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("c.json", '{"grpo": ', "is no JSON"),
        (
            "c.json",
            "[]",
            "has none of the sections grpo, async_rl, rollout_recovery, checkpointing",
        ),
        (
            "c.json",
            '{"policy": {}}',
            "has none of the sections grpo, async_rl, rollout_recovery, checkpointing",
        ),
        (
            "c.json",
            '{"grpo": {"num_prompt_per_step": 2}}',
            "unknown key grpo.num_prompt_per_step; did you mean grpo.num_prompts_per_step?",
        ),
        ("c.yaml", "grpo: [", "is no YAML"),
    ],
)
def test_a_config_that_makes_no_sense_is_wrong_usage(
    run: Path, command: Command, tmp_path: Path, name: str, content: str, problem: str
) -> None:
    (tmp_path / name).write_text(content)
    status, printed = command("inspect", run, "--config", tmp_path / name)
    assert status == 2
    assert problem in printed


# audit ---------------------------------------------------------------------------------


def test_audit_compares_the_log_with_the_bundles(run: Path, command: Command) -> None:
    status, printed = command("audit", run)
    assert status == 0
    assert "  agree with the log  step_3, step_6, step_9\n" in printed
    prompts = audit_log(run / "events.jsonl").prompts
    assert printed.splitlines()[-1] == (
        f"conservation holds: {prompts} prompts = 36 trained + 0 dropped + {prompts - 36} pending,"
        " each exactly once"
    )
    status, printed = command("audit", run, "--json")
    result = json.loads(printed)
    assert (status, result["ok"], result["trained"]) == (0, True, 36)
    assert [life["parent"] is None for life in result["history"]] == [True, False]
    assert result["summary"].startswith("conservation holds: ")


def test_audit_of_a_log_alone(run: Path, command: Command) -> None:
    status, printed = command("audit", run / "events.jsonl")
    assert status == 0
    assert "agree with the log" not in printed


def test_audit_speaks_of_served_groups_where_they_name_their_engines(
    run: Path, command: Command
) -> None:
    log = run / "events.jsonl"
    printed = command("audit", log)[1]
    assert " served " in printed and "  confirmed " in printed
    unnamed = [msgspec.structs.replace(event, served=None) for event in read_events(log)]
    log.write_bytes(msgspec.json.Encoder().encode_lines(unnamed))
    status, printed = command("audit", log)
    assert (status, " confirmed " in printed) == (0, True)
    assert " served " not in printed and "which engine" not in printed


def test_audit_names_a_damaged_bundle_and_compares_the_others(run: Path, command: Command) -> None:
    (run / "checkpoints" / "step_6" / "MANIFEST.json").unlink()
    status, printed = command("audit", run)
    assert status == 0
    assert "  not compared        step_6: MANIFEST.json: missing\n" in printed
    assert "  agree with the log  step_3, step_9\n" in printed


def test_audit_names_seq_and_ordinal_of_what_is_wrong(run: Path, command: Command) -> None:
    log = run / "events.jsonl"
    events = list(read_events(log))
    gone = next(event for event in events if event.event == "admitted" and event.ordinal == 7)
    log.write_bytes(msgspec.json.Encoder().encode_lines([e for e in events if e.seq != gone.seq]))
    status, printed = command("audit", run)
    assert status == 1
    assert printed.splitlines()[-1].startswith("conservation is broken, ")
    assert ": ordinal 7: dispatched after it was never admitted" in printed
    status, printed = command("audit", run, "--json")
    assert (status, json.loads(printed)["violations"][0]["ordinal"]) == (1, 7)


def test_audit_finds_a_bundle_that_contradicts_the_log(run: Path, command: Command) -> None:
    """The log lacks a whole prompt, which by itself is lawful; the bundles remember it."""
    log = run / "events.jsonl"
    events = list(read_events(log))
    last = verify(run / "checkpoints" / "step_9").cut.next_ordinal - 1
    lawful = [event for event in events if event.ordinal is None or event.ordinal < last]
    log.write_bytes(msgspec.json.Encoder().encode_lines(lawful))
    assert command("audit", log)[0] == 0
    status, printed = command("audit", run)
    assert status == 1
    assert f"step_9 has {last + 1} prompts that left the source; the log has {last}" in printed


def test_audit_shows_the_first_of_many_violations(run: Path, command: Command) -> None:
    log = run / "events.jsonl"
    events = [event for event in read_events(log) if event.event != "admitted"]
    prompts = len({event.ordinal for event in events if event.event == "dispatched"})
    log.write_bytes(msgspec.json.Encoder().encode_lines(events))
    status, printed = command("audit", run / "events.jsonl")
    assert status == 1
    assert printed.count("dispatched after it was never admitted") == 21
    assert f"  and {prompts - 20} more\n" in printed


def test_audit_names_a_broken_line(run: Path, command: Command) -> None:
    with (run / "events.jsonl").open("r+b") as file:
        file.write(b"{\n")
    status, printed = command("audit", run)
    assert status == 1
    assert "events.jsonl: line 1 is not an event" in printed
    status, printed = command("audit", run, "--json")
    assert (status, json.loads(printed)["ok"]) == (1, False)


def test_audit_asks_the_sampler_again(run: Path, command: Command) -> None:
    status, printed = command("audit", "--replay", run)
    assert status == 0
    report = replay_run(run)
    assert report.selections == 9 and report.bundles == ("step_3", "step_6", "step_9")
    assert printed.splitlines()[-2:] == [str(audit_run(run)), str(report)]
    assert str(report).startswith("the replay agrees: ")
    status, printed = command("audit", "--replay", run / "events.jsonl", "--json")
    result = json.loads(printed)
    assert (status, result["ok"], result["replay"]["bundles"]) == (0, True, [])


def test_audit_names_the_first_decision_that_differs(run: Path, command: Command) -> None:
    log = run / "events.jsonl"
    events = list(read_events(log))
    first = [event.seq for event in events if event.event == "selected"][:4]
    order = [*first[1:], first[0]]  # lawful, and not what a batch looks like
    swapped = {seq: events[other - 1] for seq, other in zip(first, order, strict=True)}
    log.write_bytes(
        msgspec.json.Encoder().encode_lines(
            msgspec.structs.replace(swapped.get(event.seq, event), seq=event.seq)
            for event in events
        )
    )
    assert command("audit", run)[0] == 0
    status, printed = command("audit", "--replay", run)
    assert status == 1
    last = printed.splitlines()[-1]
    assert last.startswith(f"the replay differs: seq {first[0]}: select: the log has selected ")
    status, printed = command("audit", "--replay", "--json", run)
    result = json.loads(printed)
    assert (status, result["ok"], result["violation_count"]) == (1, False, 0)
    found = result["replay"]["difference"]
    assert (found["seq"], found["decision"]) == (first[0], "select")
    assert found["view"]["ready"] >= 4


def test_a_log_of_before_is_not_replayed(run: Path, command: Command) -> None:
    log = run / "events.jsonl"
    old = [msgspec.structs.replace(event, settings=None) for event in read_events(log)]
    log.write_bytes(msgspec.json.Encoder().encode_lines(old))
    status, printed = command("audit", "--replay", run)
    assert status == 1
    assert printed.splitlines()[-1].startswith("no replay: seq 1: run_started of incarnation ")


# usage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["frobnicate"],
        ["verify", "{run}/nowhere"],
        ["inspect", "{run}/nowhere"],
        ["inspect", "{run}", "--config", "{run}/nowhere"],
        ["audit", "{run}/nowhere"],
        ["audit", "{run}/checkpoints"],
    ],
)
def test_wrong_usage_is_status_2_and_one_line(
    saved: Path, command: Command, arguments: list[str]
) -> None:
    status, printed = command(*(argument.format(run=saved) for argument in arguments))
    assert status == 2
    assert printed.count(": error: ") == 1


@pytest.mark.parametrize("arguments", ["inspect {}", "inspect {} --json", "audit {}"])
def test_a_reader_that_has_seen_enough_is_no_error(saved: Path, arguments: str) -> None:
    command = f"{sys.executable} -m sc_core {arguments.format(saved)} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_loads_none_of_the_world(saved: Path) -> None:
    script = (
        "import sys; from sc_core.__main__ import main; status = main(sys.argv[1:]);"
        "loaded = {'ray', 'torch', 'trio', 'yaml', 'pickle'} & set(sys.modules);"
        "sys.exit(f'loaded {loaded}' if loaded else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "audit", str(saved)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" each exactly once\n")
