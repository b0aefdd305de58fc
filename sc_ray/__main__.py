"""`python -m sc_ray train|config|verify|status|checkpoint|stop`: a run from the command line.

Exit status: 0 done, 3 stopped on request with a bundle, 1 failed, 2 wrong usage.

`checkpoint` and `stop` are signals to the process that `RUN/lock` names, which is the driver's;
`status` is what it last wrote into `RUN/status.json`. So all three work at once, without Ray, on
the driver's machine; on any other one they say where to go.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
import time
import warnings
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sc_core import (
    ConfigError,
    ScError,
    WorkerDied,
    candidates,
    verify,
)
from sc_ray.run_directory import (
    CHECKPOINTS,
    LOGS,
    METRICS,
    NotRunning,
    RunDirectory,
    last_report,
    published,
    running_pid,
)

DONE, FAILED, WRONG_USAGE, STOPPED = 0, 1, 2, 3
_LOOK_EVERY_S = 0.1
_QUIET_S = 60.0
"""Longer without progress is worth a line of `status`."""
_CONTROLLER = "the controller"
_OF_A_STEP = ("step", "max_steps", "last_metrics", "places_held", "places_capacity")
_OF_THE_EXTRA = frozenset(
    "omegaconf prometheus_client psutil ray rich safetensors tensorboard torch transfer_queue"
    " transformers yaml".split()
)
"""What the extra `ray` installs, as it is imported."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # any path or reason can be told on any terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = int(options.command(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read this, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ConfigError as exc:
        return _complain(exc, WRONG_USAGE)
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in _OF_THE_EXTRA:
            raise
        said = f"this needs {missing}, which is not here: pip install 'single-controller[ray]'"
        return _complain(ConfigError(said), WRONG_USAGE)
    except (ScError, OSError) as exc:
        return _complain(exc, FAILED)


def _complain(error: BaseException, status: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"sc_ray: error: {text}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sc_ray", description=_first_lines())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train, or go on from the newest checkpoint")
    _takes_settings(train)
    train.add_argument("--out", type=Path, metavar="RUN", help="default: runs/<config's name>")
    train.add_argument("--resume", default="auto", metavar="auto|never|PATH")
    train.set_defaults(command=_train)
    config = commands.add_parser("config", help="print all settings, and what each of them does")
    _takes_settings(config)
    config.set_defaults(command=_config)
    checked = commands.add_parser("verify", help="check bundles, without changing anything")
    checked.add_argument("path", type=Path, metavar="RUN|BUNDLE")
    checked.add_argument(
        "--deep", action="store_true", help="also load each data_plane and read every row of it"
    )
    checked.add_argument("--json", action="store_true", help="print one JSON object instead")
    checked.set_defaults(command=_verify)
    status = commands.add_parser("status", help="what a run is doing")
    status.add_argument("run", type=Path, metavar="RUN")
    status.add_argument("--json", action="store_true", help="all that is known, as JSON")
    status.set_defaults(command=_status)
    for name, what, command in (
        ("checkpoint", "have a run save a checkpoint, and wait until it has", _checkpoint),
        ("stop", "have a run save and end, and wait until it has", _stop),
    ):
        steer = commands.add_parser(name, help=what)
        steer.add_argument("run", type=Path, metavar="RUN")
        steer.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
        steer.set_defaults(command=command)
    return parser


def _takes_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="demo", metavar="NAME|FILE", help="default: demo")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="grpo.max_num_steps=20")


def _first_lines() -> str:
    return (__doc__ or "").partition("\n\n`")[0]


# settings ------------------------------------------------------------------------------


def _config(options: argparse.Namespace) -> int:
    from sc_ray.annotated import annotated
    from sc_ray.settings import load_config

    print(annotated(load_config(options.config, options.settings)), end="")
    return DONE


# train ---------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    from sc_ray.supervise import Interrupted, Signals

    with Signals() as signals:
        try:
            return _train_under(signals, options)
        except (Interrupted, SystemExit):  # ray.init, while it runs, answers SIGTERM by an exit
            name = signals.stopped_by or signal.SIGTERM.name
            print(f"sc_ray: {name} before training had begun; nothing changed", file=sys.stderr)
            return STOPPED if published(_out(options)) else FAILED


def _train_under(signals: Any, options: argparse.Namespace) -> int:
    from sc_ray.before_ray import check_start, metrics_port
    from sc_ray.prepared import Prepared
    from sc_ray.progress import PlainConsole
    from sc_ray.settings import load_config

    config = load_config(options.config, options.settings)
    resume = _resume(options)
    prepared, out, say = Prepared.of(config), _out(options), PlainConsole(sys.stdout).say
    if not out.exists():  # and does not come to be, unless something is started
        metrics_port(config.logger)
    with RunDirectory(out) as run:
        over = check_start(config, run.path, prepared, resume, say)
        if over is not None:
            say(
                f"nothing left to do: step {over.step} of {config.grpo.max_num_steps} is in"
                f" {over.path}"
            )
            return DONE
        before = _without_phase(run.path)
        run.report("starting")
        try:
            phase, status = _run(signals, config, run, prepared, resume)
        except BaseException as exc:
            run.report("failed", {**_last_step(run.path, before), "error": str(exc)})
            raise
        run.report(phase, _last_step(run.path, before))
        return status


def _resume(options: argparse.Namespace) -> Any:
    if options.resume in ("auto", "never"):
        return options.resume
    path = Path(options.resume)
    if not path.is_dir():
        raise ConfigError(f"--resume: there is no checkpoint {path}; auto takes the newest")
    return path


def _out(options: argparse.Namespace) -> Path:
    return options.out or Path("runs") / Path(options.config).stem


def _run(
    signals: Any, config: Any, run: RunDirectory, prepared: Any, resume: Any
) -> tuple[str, int]:
    from sc_ray.progress import console_on, learning_curve
    from sc_ray.views import write_views

    console = console_on(sys.stdout)
    signals.on_leave = console.leave
    most = config.cluster.max_controller_restarts
    for restart in range(1, most + 2):
        try:
            try:
                result = _live(signals, config, run, console, prepared, resume)
            except Exception:
                write_views(run.path, console.say)
                raise
            write_views(run.path, console.say)
            break
        except WorkerDied as death:
            signals.unsteer()
            if restart > most or signals.stopped_by is not None or not _may_restart(death):
                raise
            console.say(
                f"{death}; going on from the newest checkpoint, restart {restart} of {most}"
            )
            run.report("starting")
            resume = "auto"
    max_steps = config.grpo.max_num_steps
    bundle = f"step_{result.step}"
    has_bundle = bundle in published(run.path)
    newest = f"; {run.path / CHECKPOINTS / bundle}" if has_bundle else ""
    reached = f"step {result.step} of {max_steps}"
    curve = learning_curve(run.path / METRICS)
    if result.reason in ("stopped", "must_save_by"):
        in_time = "" if result.reason == "stopped" else ", as checkpoint_must_save_by says"
        console.say(f"stopped at {reached}{in_time}: {curve}{newest}")
        if has_bundle:
            console.say("the same command goes on from there")
        return "stopped", STOPPED if has_bundle else FAILED
    why = "" if result.reason == "max_steps" else ", out of prompts"
    console.say(f"done: {reached}{why}; {curve}{newest}")
    return "done", DONE


def _live(
    signals: Any, config: Any, run: RunDirectory, console: Any, prepared: Any, resume: Any
) -> Any:
    """One life of the controller, from Ray's start to the end of all that was started.

    Raises:
        ConfigError, ScError: it failed; what more is known is in `logs/failure.txt`.
        WorkerDied: a process is gone, of the controller or of another part.
    """
    import anyio
    from ray.exceptions import RayActorError

    from sc_ray.driver_log import warnings_in
    from sc_ray.failures import ControllerFailed
    from sc_ray.setup import setup_single_controller, start_actor
    from sc_ray.supervise import supervise
    from sc_ray.transfer_queue import processes_of
    from sc_ray.workers import died

    with ExitStack() as on_exit:
        log = on_exit.enter_context((run.path / LOGS / "driver.log").open("a"))
        on_exit.enter_context(warnings_in(log))
        on_exit.enter_context(redirect_stdout(log))  # Ray reports deaths on it, at length

        def say(stage: str) -> None:
            console.say(stage)
            run.report("starting", {"stage": stage})

        args = setup_single_controller(
            config, run.path, resume, on_exit=on_exit, prepared=prepared, say=say
        )
        if args.metrics_url is not None:
            run.facts["prometheus"] = args.metrics_url
            console.say(f"metrics for Prometheus at {args.metrics_url}")
        actor = start_actor(args, on_exit)
        watch = partial(
            supervise,
            *(actor, run, console, signals),
            max_steps=config.grpo.max_num_steps,
            vital=processes_of(args.rows),
            resumed_from=args.sent.path,
        )
        try:
            return anyio.run(watch)
        except ControllerFailed as exc:
            more = run.path / LOGS / "failure.txt"
            more.write_text(exc.traceback_text)
            wrong_usage = exc.type_name == "ConfigError"
            first, *_ = str(exc).splitlines()  # of a stall, the cause; its report follows
            raise (ConfigError if wrong_usage else ScError)(f"{first} (more in {more})") from exc
        except RayActorError as exc:
            raise died(_CONTROLLER, exc) from exc


def _may_restart(death: WorkerDied) -> bool:
    """Whether it was the controller's process that died, and not by an error of its own start."""
    started = not getattr(death.__cause__, "actor_init_failed", False)
    return death.worker == _CONTROLLER and started


def _last_step(path: Path, before: dict[str, Any]) -> dict[str, Any]:
    """What this start told of itself; of a step, what one `before` did if it made none."""
    told = _without_phase(path)
    if not told.get("last_metrics"):
        told |= {name: before[name] for name in _OF_A_STEP if name in before}
    if not told.get("last_evaluation") and "last_evaluation" in before:
        told["last_evaluation"] = before["last_evaluation"]
    return told


def _without_phase(path: Path) -> dict[str, Any]:
    told = last_report(path)
    for name in ("phase", "t", "pid"):
        told.pop(name, None)
    return told


# bundles -------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    path: Path = options.path
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such directory")
    is_run = (path / CHECKPOINTS).is_dir()
    bundles = candidates(path / CHECKPOINTS if is_run else path)[::-1] or [path]
    if is_run and bundles == [path]:
        raise ScError(f"{path} holds no checkpoints")
    results = []
    for bundle in bundles:
        result = _verified(bundle, options.deep)
        results.append({"path": str(bundle), "ok": "error" not in result, **result})
        if not options.json and "error" in result:
            print(f"sc_ray: error: {result['error']}", file=sys.stderr)
        elif not options.json:
            print(f"{bundle.name}: ok; " + ", ".join(f"{k} {v}" for k, v in result.items()))
    ok = all(result["ok"] for result in results)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode({"ok": ok, "bundles": results})).decode())
    return DONE if ok else FAILED


def _verified(path: Path, deep: bool) -> dict[str, Any]:
    """What was found out about a bundle, or `error`: the first thing that is wrong with it."""
    from sc_ray.deep import look_inside

    key = os.environ.get("SC_BUNDLE_KEY", "").encode() or None
    try:
        bundle = verify(path, key=key)
        found = {"step": bundle.step, "digest": bundle.digest}
        inside = look_inside(bundle.path) if deep else None
    except ScError as exc:
        return {"error": " ".join(str(exc).split())}
    if inside is None:
        return found
    if inside.error is not None:
        return {**found, "error": inside.error}
    return {
        **found,
        "groups": inside.groups,
        "rows": inside.rows,
        "suspects": inside.suspects,
        "columns": len(inside.columns),
        "bytes": inside.bytes,
    }


# to a running one ----------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    path = options.run
    told, pid = last_report(path), running_pid(path)
    if not told and pid is None:
        raise NotRunning(str(path))
    if pid is None and told.get("phase") in ("starting", "running", "stopping"):
        told["phase"] = "killed"
    told["bundles"] = list(published(path))
    if options.json:
        print(msgspec.json.encode(told).decode())
        return DONE
    from sc_ray.progress import ago, engines_away, step_line

    age_s = time.time() - told.get("t", time.time())
    where = f"pid {pid}" if pid is not None else "not running"
    quiet_s = told.get("quiet_s", 0.0) if pid is not None else 0.0
    serving = ", ".join(told.get("engines") or ())
    print(f"{told.get('phase', 'starting')} ({where}), {ago(age_s)}")
    for line in (
        told.get("stage", ""),
        step_line(told, told.get("max_steps", 0)),
        f"no step, evaluation, sync or save for {quiet_s:.0f} s" if quiet_s > _QUIET_S else "",
        f"engines: {serving}" if serving else "",
        *(f"{engine} is {what}" for engine, what in engines_away(told).items()),
        f"conservation: {told['audit']}" if "audit" in told else "",
        f"metrics: {told['prometheus']}" if pid is not None and "prometheus" in told else "",
        f"checkpoints: {', '.join(told['bundles']) or 'none'}",
        f"error: {told['error']}" if "error" in told else "",
    ):
        if line:
            print(line)
    return DONE


def _checkpoint(options: argparse.Namespace) -> int:
    before = published(options.run)
    _signal(options.run, signal.SIGUSR1)
    give_up = time.monotonic() + options.timeout
    while time.monotonic() < give_up:
        for name, identity in published(options.run).items():
            if before.get(name) != identity:
                print(f"saved {options.run / CHECKPOINTS / name}")
                return DONE
        if running_pid(options.run) is None:
            raise ScError(f"the run in {options.run} ended without saving")
        time.sleep(_LOOK_EVERY_S)
    raise ScError(f"no checkpoint was published within {options.timeout:g} s")


def _stop(options: argparse.Namespace) -> int:
    pid = _signal(options.run, signal.SIGTERM)
    give_up = time.monotonic() + options.timeout
    while time.monotonic() < give_up:
        if running_pid(options.run) is None:
            told = last_report(options.run)
            print(f"{told.get('phase', 'ended')} at step {told.get('step', 0)}")
            return DONE
        time.sleep(_LOOK_EVERY_S)
    raise ScError(f"process {pid} did not end within {options.timeout:g} s")


def _signal(path: Path, number: signal.Signals) -> int:
    pid = running_pid(path)
    if pid is None:
        raise NotRunning(str(path))
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise NotRunning(str(path)) from None
    return pid


def keep_quiet() -> None:
    """Leave the terminal to our own lines, and to warnings of ours."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("sc_ray: %(levelname)s: %(message)s"))
    for name in ("sc_core", "sc_ray"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False


if __name__ == "__main__":
    keep_quiet()
    sys.exit(main())
