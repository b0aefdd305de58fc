"""`python -m sc_core`: look at a run's checkpoints, event log and course. Needs neither Ray nor
torch.

Exit status: 0 fine, 1 something is wrong and is named, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from sc_core.audit import CHECKPOINTS, EVENTS, AuditReport, audit_log, audit_run
from sc_core.config import ControllerConfig, decode
from sc_core.errors import ConfigError, NoValidBundle, RestoreError, ScError
from sc_core.manifest import MANIFEST, parse_name
from sc_core.outlook import outlook
from sc_core.replay import replay_log, replay_run
from sc_core.seeing import REPORT, STEPS, TRACE, write_report, write_trace
from sc_core.verify import VerifiedBundle, candidates, newest_valid, verify

SHOWN_VIOLATIONS = 20
WIDTH = 100
EACH = {
    "by_start_version": "of version ",
    "by_target_step": "for version ",
    "attempts": "at attempt ",
    "short_steps": "fewer from version ",
}


class UsageError(Exception):
    """The command line asks for what can't be done."""


# verify --------------------------------------------------------------------------------


def verify_command(args: argparse.Namespace) -> int:
    path = existing(args.path)
    paths = [path] if is_bundle(path) else bundles_in(path)[::-1]
    checked = paths[0].name if len(paths) == 1 else f"{len(paths)} bundles"
    results: list[dict[str, Any]] = []
    for one in paths:
        try:
            bundle = verify(one, key=bundle_key())
        except RestoreError as exc:
            say(args, f"{one}\n  {exc}")
            results.append({"path": str(one), "ok": False, "error": str(exc)})
            continue
        parts = parts_of(bundle)
        files, size = map(sum, zip(*parts.values(), strict=True))
        has = f"step {bundle.step:,}, {files:,} files, {size:,} bytes, {signature_of(bundle)}"
        say(args, f"{one}: ok; {has}")
        results.append(
            {
                "path": str(one),
                "ok": True,
                "step": bundle.step,
                "digest": bundle.digest,
                "parts": {n: {"files": f, "bytes": s} for n, (f, s) in parts.items()},
            }
        )
    failed = [result["error"] for result in results if not result["ok"]]
    if args.json:
        show_json({"ok": not failed, "bundles": results})
    elif failed:
        print(f"{checked}: {len(failed)} damaged; {failed[0]}")
    elif len(paths) > 1:
        print(f"{checked}: ok")
    return 1 if failed else 0


def signature_of(bundle: VerifiedBundle) -> str:
    if bundle_key() is not None:
        return "signed with SC_BUNDLE_KEY"
    sealed = msgspec.json.decode((bundle.path / MANIFEST).read_bytes())
    signed = sealed["hmac_sha256"] is not None
    return "signature not checked (SC_BUNDLE_KEY is not set)" if signed else "not signed"


def parts_of(bundle: VerifiedBundle) -> dict[str, tuple[int, int]]:
    """Files and bytes of each directory and each single file of a bundle."""
    parts: dict[str, tuple[int, int]] = {}
    for name, seal in bundle.manifest.files.items():
        directory, slash, _ = name.partition("/")
        files, size = parts.get(directory + slash, (0, 0))
        parts[directory + slash] = files + 1, size + seal.size
    parts[MANIFEST] = 1, (bundle.path / MANIFEST).stat().st_size
    return {name: parts[name] for name in sorted(parts, key=lambda name: (name[-1] != "/", name))}


# inspect -------------------------------------------------------------------------------


def inspect_command(args: argparse.Namespace) -> int:
    path = existing(args.path)
    config = None if args.config is None else read_config(existing(args.config))
    refused: list[str] = []
    if is_bundle(path):
        bundle = verify(path, key=bundle_key())
    else:
        bundle = newest_in(path, refused)
    facts = facts_of(bundle)
    future = None if config is None else outlook(bundle.cut, config)
    if args.json:
        ok = future is None or future.refused is None
        resume = {} if future is None else {"resume": future}
        files = {name: seal.size for name, seal in bundle.manifest.files.items()}
        more = {"files": files, "damaged": refused, **resume}
        show_json({"ok": ok, "path": str(bundle.path), **facts, **more})
    else:
        for line in refused:
            print(f"skipped: {line}")
        print(bundle.path)
        for name, fact in facts.items():
            if name == "by_target_step" and not fact:  # most samplers give none
                continue
            shown = counts(fact, EACH.get(name, "")) if isinstance(fact, Mapping) else str(fact)
            print(f"  {name.replace('_', ' '):<20}{broken(shown, WIDTH - 22, ' ' * 22)}")
        if future is not None:
            print(f"a resume with {args.config}")
            for note in future.notes:
                print(f"  {note}")
            if future.refused is not None:
                print(f"  is refused: {future.refused}")
    return 0 if future is None or future.refused is None else 1


def facts_of(bundle: VerifiedBundle) -> dict[str, Any]:
    cut, info = bundle.cut, bundle.info
    return {
        "step": cut.step,
        "weight_version": cut.weight_version,
        "kept": "by ft_keep_latest_k alone" if info.ft_only else "by every rule",
        "saved": datetime.fromtimestamp(info.created, UTC).isoformat(" ", "seconds"),
        "incarnation": cut.incarnation,
        "event": cut.event_seq,
        "digest": bundle.digest,
        "groups_per_step": cut.prompts_per_step,
        "siblings_per_group": cut.group_size,
        "sampler": cut.sampler,
        "prompts": {
            "pulled": cut.next_ordinal,
            "trained": cut.counters.get("trained", 0),
            "dropped": cut.counters.get("dropped", 0),
            "live": len(cut.records),
        },
        "source": "has ended" if cut.exhausted else "goes on",
        "ledger": Counter(record.state for record in cut.records),
        "attempts": by_number(record.attempt for record in cut.records),
        "failures": {
            "infrastructure": sum(record.infra_failures for record in cut.records),
            "data": sum(record.data_failures for record in cut.records),
            "stale": sum(record.stale_requeues for record in cut.records),
        },
        "by_start_version": by_number(group.start_weight_version for group in cut.groups),
        "by_target_step": by_number(
            record.target_step for record in cut.records if record.target_step is not None
        ),
        "short_steps": dict(cut.short_steps),
        "suspects": len(cut.suspects),
        "bytes": {name: size for name, (_, size) in parts_of(bundle).items()},
    }


def by_number(numbers: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(numbers).items()))


def read_config(path: Path) -> ControllerConfig:
    """The controller's sections of a configuration file; others are not looked at.

    Raises:
        UsageError: it can't be read.
        ConfigError: a setting is unknown or impossible.
    """
    raw = path.read_bytes()
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        if path.suffix == ".json":
            raise UsageError(f"{path} is no JSON: {exc}") from exc
        data = read_yaml(path, raw)
    known = ControllerConfig.__struct_fields__
    sections = {key: data[key] for key in known if key in data} if isinstance(data, dict) else {}
    if not sections:
        raise UsageError(f"{path} has none of the sections {', '.join(known)}")
    return decode(sections, ControllerConfig, source=str(path))


def read_yaml(path: Path, raw: bytes) -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"{path} is no JSON, and reading YAML needs PyYAML: pip install pyyaml"
        ) from None
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError as exc:
        raise UsageError(f"{path} is no YAML: {' '.join(str(exc).split())}") from exc


# audit ---------------------------------------------------------------------------------


def audit_command(args: argparse.Namespace) -> int:
    run = existing(args.run)
    log = run if run.is_file() else with_log(run) / EVENTS
    report = audit_run(run, key=bundle_key()) if run.is_dir() else audit_log(log)
    replayed = replayed_of(run, log) if args.replay else None
    ok = report.ok and (replayed is None or replayed["ok"])
    if args.json:
        summary = {"ok": ok, "summary": str(report), **msgspec.to_builtins(report)}
        show_json(summary if replayed is None else {**summary, "replay": replayed})
        return 0 if ok else 1
    print(log)
    for name, fact in audit_facts(report).items():
        print(f"  {name:<20}{fact}")
    for violation in report.violations[:SHOWN_VIOLATIONS]:
        print(f"  {violation}")
    if report.violation_count > SHOWN_VIOLATIONS:
        print(f"  and {report.violation_count - SHOWN_VIOLATIONS} more")
    print(report)
    if replayed is not None:
        print(replayed["summary"])
    return 0 if ok else 1


def replayed_of(run: Path, log: Path) -> dict[str, Any]:
    """What a replay found, or why there can be none."""
    try:
        report = replay_run(run, key=bundle_key()) if run.is_dir() else replay_log(log)
    except RestoreError as exc:
        return {"ok": False, "summary": f"no replay: {exc}"}
    return {"ok": report.ok, "summary": str(report), **msgspec.to_builtins(report)}


def audit_facts(report: AuditReport) -> dict[str, str]:
    lives = (f"{life.incarnation} ({life.first_seq}-{life.last_seq})" for life in report.history)
    facts = {
        "history": " -> ".join(lives) or "empty",
        "events": f"{report.events}, and {report.undone_events} undone by resumes",
        "trained": f"{report.trained} prompts in {report.step} steps",
        "dropped": counts(report.dropped),
        "pending": counts(report.pending),
    }
    if report.engines:
        named = report.names_servers
        facts["engines"] = "; ".join(
            f"{name} "
            + (f"served {engine.groups:,} groups, " if named else "")
            + f"confirmed {engine.confirmed:,} versions"
            + (f" ({engine.joined} of them when it joined)" if engine.joined else "")
            for name, engine in report.engines.items()
        )
        if named:
            facts["confirmed"] = report.served
    if report.bundles:
        facts["agree with the log"] = ", ".join(report.bundles)
    if report.other_bundles:
        facts["not compared"] = "; ".join(
            why if why.startswith(name) else f"{name}: {why}"
            for name, why in report.other_bundles.items()
        )
    return facts


# report, trace -------------------------------------------------------------------------


def report_command(args: argparse.Namespace) -> int:
    return show_written(args, write_report(with_log(existing(args.run)), args.out))


def trace_command(args: argparse.Namespace) -> int:
    run = with_log(existing(args.run))
    return show_written(args, write_trace(run, args.out, steps=args.steps))


def show_written(args: argparse.Namespace, path: Path) -> int:
    if args.json:
        show_json({"ok": True, "path": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return 0


def step_count(text: str) -> int:
    steps = int(text)
    if steps < 0:
        raise ValueError(text)
    return steps


# shared --------------------------------------------------------------------------------


def existing(path: str) -> Path:
    found = Path(os.path.abspath(path))
    if not found.exists():
        raise UsageError(f"{path} does not exist")
    return Path(path)


def with_log(run: Path) -> Path:
    if not (run / EVENTS).is_file():
        raise UsageError(f"{run} has no {EVENTS}: is it the directory of a run?")
    return run


def is_bundle(path: Path) -> bool:
    return parse_name(Path(os.path.abspath(path)).name) is not None or (path / MANIFEST).exists()


def bundles_in(path: Path) -> list[Path]:
    """The bundles of a run, or of a directory of checkpoints, newest first."""
    inner = path / CHECKPOINTS
    found = candidates(inner if inner.is_dir() else path)
    if not found:
        raise RestoreError(f"{path} holds no checkpoints")
    return found


def newest_in(path: Path, refused: list[str]) -> VerifiedBundle:
    bundles = bundles_in(path)
    bundle = newest_valid(
        bundles[0].parent,
        key=bundle_key(),
        on_refused=lambda name, reason: refused.append(str(reason)),
    )
    if bundle is None:
        raise NoValidBundle(str(path), refused)
    return bundle


def bundle_key() -> bytes | None:
    return os.environ.get("SC_BUNDLE_KEY", "").encode() or None


def counts(numbers: Mapping[Any, int], each: str = "") -> str:
    return ", ".join(f"{number:,} {each}{name}" for name, number in numbers.items()) or "none"


def broken(text: str, width: int, indent: str) -> str:
    """In lines of at most `width`, if a break after a comma can make them."""
    lines: list[str] = []
    for part in text.split(", "):
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return f",\n{indent}".join(lines)


def say(args: argparse.Namespace, line: object) -> None:
    if not args.json:
        print(line)


def show_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m sc_core", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=about)
        one.set_defaults(command=run)
        one.add_argument("--json", action="store_true", help="print one JSON object instead")
        return one

    path_help = "a bundle (RUN/checkpoints/step_N), a directory of bundles, or a run"
    one = command("verify", verify_command, "check every file of a bundle against its manifest")
    one.add_argument("path", metavar="PATH", help=path_help)
    one = command("inspect", inspect_command, "show what a bundle holds; of a run, the newest")
    one.add_argument("path", metavar="PATH", help=path_help)
    one.add_argument("--config", metavar="FILE", help="say what a resume with it would do")
    one = command("audit", audit_command, "check that no prompt was lost or trained twice")
    one.add_argument("run", metavar="RUN", help="the directory of a run, or its events.jsonl")
    one.add_argument(
        "--replay", action="store_true", help="also ask the sampler again at every decision"
    )
    one = command("report", report_command, "write a page about a run, to be read offline")
    one.add_argument("run", metavar="RUN", help="the directory of a run, which may be going on")
    one.add_argument("--out", type=Path, metavar="FILE", help=f"default: RUN/{REPORT}")
    one = command("trace", trace_command, "write a trace of a run, for ui.perfetto.dev")
    one.add_argument("run", metavar="RUN", help="the directory of a run, which may be going on")
    one.add_argument("--out", type=Path, metavar="FILE", help=f"default: RUN/{TRACE}")
    one.add_argument(
        "--steps",
        type=step_count,
        default=STEPS,
        metavar="N",
        help=f"the last N steps, 0 for all of them; default: {STEPS}",
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's name may be no text
        sys.stdout.reconfigure(errors="backslashreplace")
    top = parser()
    args = top.parse_args(arguments)
    try:
        status: int = args.command(args)
        sys.stdout.flush()
        return status
    except (UsageError, ConfigError) as exc:
        top.error(str(exc))
    except BrokenPipeError:  # whoever read this, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ScError, OSError) as exc:
        if args.json:
            show_json({"ok": False, "error": str(exc)})
        else:
            print(exc)
        return 1


if __name__ == "__main__":
    sys.exit(main())
