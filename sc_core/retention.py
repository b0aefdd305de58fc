"""Which bundles may go, and deleting them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from sc_core.bundle import BundleStore
from sc_core.config import CheckpointingConfig
from sc_core.errors import RestoreError, SaveError
from sc_core.manifest import AT_MOST_BYTES, INFO, TrainingInfo, bundle_name, parse_name
from sc_core.verify import candidates, newest_valid


def to_prune(
    bundles: Sequence[tuple[int, float | None]],
    *,
    keep_top_k: int | None,
    ft_keep_latest_k: int | None,
    higher_is_better: bool = True,
    ft_only: Collection[int] | None = None,
    protected: Collection[int] = (),
) -> list[int]:
    """Steps of the bundles to delete, oldest first, of `(step, metric)` pairs of valid ones.

    Kept are the `keep_top_k` best by metric and the `ft_keep_latest_k` newest, together; the
    newest; and the `protected`. A rule that is None (or negative) does not take part, and if
    neither does, everything is kept. A rule of 0 keeps nothing by itself. A metric that is
    missing or not a number is worse than any other; among equals the newer is better.

    With `ft_only`, the steps of the bundles that are there for fault tolerance alone, each rule
    has its own: those are not ranked, and without an `ft_keep_latest_k` all of them are kept,
    as are all others without a `keep_top_k`. The newest are counted over both.
    """
    top = keep_top_k if keep_top_k is not None and keep_top_k >= 0 else None
    newest = ft_keep_latest_k if ft_keep_latest_k is not None and ft_keep_latest_k >= 0 else None
    if top is None and newest is None:
        return []
    latest = sorted((step for step, _ in bundles), reverse=True)

    def rank(bundle: tuple[int, float | None]) -> tuple[bool, float, int]:
        step, metric = bundle
        if metric is None or math.isnan(metric):
            return False, 0.0, step
        return True, metric if higher_is_better else -metric, step

    kept = {*protected, *latest[:1]}
    ranked = [bundle for bundle in bundles if bundle[0] not in (ft_only or ())]
    best = [step for step, _ in sorted(ranked, key=rank, reverse=True)]
    if newest is not None:
        kept.update(latest[:newest])
    elif ft_only is not None:
        kept.update(ft_only)
    if top is not None:
        kept.update(best[:top])
    elif ft_only is not None:
        kept.update(best)
    return sorted(step for step in latest if step not in kept)


def prune(
    store: BundleStore, config: CheckpointingConfig, protected: Collection[int] = ()
) -> list[str]:
    """Delete the bundles that `config` does not keep; returns what went wrong, as sentences.

    `protected` is what this run was resumed from. What this store published last is never
    deleted; if it has published nothing yet, the newest bundle that verifies is not. Those of
    later steps belong to a future that this run has left, or are damaged: they are neither
    counted nor deleted, as is a bundle whose `training_info.json` can't be read.
    """
    try:
        newest = store.published
        if newest is None:
            valid = newest_valid(store.directory, store.disk, key=store.key)
            newest = -1 if valid is None else valid.step
        steps = [s for s in _steps(store) if s <= newest]
    except RestoreError as exc:
        return [f"nothing was pruned: {exc}"]
    failures: list[str] = []
    bundles: list[tuple[int, float | None]] = []
    ft_only: set[int] = set()
    for step in steps:
        try:
            info = _info(store, step)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as exc:
            failures.append(f"{bundle_name(step)} is left alone: {INFO}: {exc}")
        else:
            bundles.append((step, info.metrics.get(config.ranked_by or "")))
            if info.ft_only:
                ft_only.add(step)
    for step in to_prune(
        bundles,
        keep_top_k=config.keep_top_k,
        ft_keep_latest_k=config.ft_keep_latest_k,
        higher_is_better=config.higher_is_better,
        ft_only=None if config.ft_save_period is None else ft_only,
        protected=protected,
    ):
        try:
            store.discard(step)
        except SaveError as exc:
            failures.append(str(exc))
    return failures


def _steps(store: BundleStore) -> list[int]:
    names = (parse_name(path.name) for path in candidates(store.directory, store.disk))
    return [name[1] for name in names if name is not None and name[0] == "step_"]


def _info(store: BundleStore, step: int) -> TrainingInfo:
    file = store.directory / bundle_name(step) / INFO
    raw = store.disk.read(file, AT_MOST_BYTES[INFO])
    return msgspec.json.decode(raw, type=TrainingInfo)
