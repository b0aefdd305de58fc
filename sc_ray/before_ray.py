"""What a start can know before it starts or changes anything: settings, and the newest bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from sc_core import (
    ConfigChanged,
    GrpoConfig,
    VerifiedBundle,
    candidates,
    check_config,
    choose_bundle,
)
from sc_ray.model import SHAPE
from sc_ray.prepared import Prepared, build_prompts
from sc_ray.run_directory import last_report
from sc_ray.run_store import become_writer, open_store
from sc_ray.settings import TrainConfig, to_plain
from sc_ray.tokenizer import saved_vocabulary
from sc_ray.watching.config import LoggerConfig

Resume = Literal["auto", "never"] | Path

_IN_ORDER = ("done", "stopped")  #: phases of a run whose last start left nothing undone


def check_start(
    config: TrainConfig,
    run_dir: Path,
    prepared: Prepared,
    resume: Resume,
    say: Callable[[str], None],
) -> VerifiedBundle | None:
    """Refuse what Ray is not needed for; `say` hears of a wait.

    Returns the newest bundle if the run has ended with it, so that nothing is left to do. Writes
    nothing to a directory without bundles.

    Raises:
        ConfigError: a port is taken.
        ConfigChanged: the settings can't go on from the bundle; names the first that differs.
        NoValidBundle, BundleDamaged, BundleInconsistent: no bundle can be used.
    """
    metrics_port(config.logger)
    store = open_store(run_dir)
    present = candidates(store.directory)
    if present:  # else nothing could be writing there
        become_writer(store, say)
    try:
        bundle = choose_bundle(store, resume, on_refused=lambda *_: None)  # the restore tells
        present = candidates(store.directory)
    finally:
        store.close()
    if bundle is None:
        return None
    fingerprint = build_prompts(config, prepared.task).fingerprint()
    check_config(bundle.cut, config.controller, fingerprint)
    _check_model(bundle, config, prepared)
    ended = last_report(run_dir).get("phase") in _IN_ORDER and bundle.path.name == present[0].name
    over = bundle.step >= config.grpo.max_num_steps and not _evaluates(bundle, config.grpo)
    return bundle if ended and over else None


def metrics_port(config: LoggerConfig) -> int | None:
    """A port that can be listened on now: the last life of the run is over."""
    if config.prometheus_port is None:
        return None
    from sc_ray.watching.prometheus import free_port

    return free_port(config.prometheus_host, config.prometheus_port)


def _check_model(bundle: VerifiedBundle, config: TrainConfig, prepared: Prepared) -> None:
    for key, was, now in _changes(bundle.config, to_plain(config)):
        raise ConfigChanged(
            f"{key} was {was!r} and is {now!r}: {bundle.path} has weights of another shape. Put"
            " it back, or start another run"
        )
    if config.policy.model.pretrained:
        return  # it may have moved; the trainer compares shapes and vocabulary
    was, now = saved_vocabulary(bundle.policy_dir), prepared.tokenizer.vocabulary()
    if was is not None and was != now:
        differ = sorted(was.keys() ^ now.keys())
        raise ConfigChanged(
            f"the vocabulary had {len(was)} tokens and has {len(now)}, {len(differ)} of them others"
            f" ({', '.join(map(repr, differ[:3]))}): {bundle.path} is of another tokenizer. Put the"
            " task's texts and task.characters back, or start another run"
        )


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What differs in the model's shape: dotted key, then and now."""
    try:
        before, after = was["policy"]["model"], now["policy"]["model"]
        pretrained = bool(before["pretrained"]), bool(after["pretrained"])
    except (KeyError, TypeError):  # the bundle of a program with settings of its own
        return []
    if all(pretrained):
        return []
    names = ("pretrained",) if any(pretrained) else SHAPE
    return [
        (f"policy.model.{name}", before[name], after[name])
        for name in names
        if name in before and before[name] != after[name]
    ]


def _evaluates(bundle: VerifiedBundle, grpo: GrpoConfig) -> bool:
    """Whether a resume would evaluate the bundle's weights, or finish doing so."""
    last, step = bundle.cut.evaluation, bundle.step
    if last is not None and last.weight_version == bundle.cut.weight_version:
        return last.summary is None
    return grpo.val_at_end or (grpo.val_period > 0 and step % grpo.val_period == 0)
