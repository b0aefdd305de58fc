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
    protected: Collection[int] = (),
) -> list[int]:
    """Steps of the bundles to delete, oldest first, of `(step, metric)` pairs of valid ones.

    Kept are the `keep_top_k` best by metric and the `ft_keep_latest_k` newest, together; the
    newest; and the `protected`. A rule that is None (or negative) does not take part, and if
    neither does, everything is kept. A rule of 0 keeps nothing by itself. A metric that is
    missing or not a number is worse than any other; among equals the newer is better.
    """
    rules = [k for k in (keep_top_k, ft_keep_latest_k) if k is not None and k >= 0]
    if not rules:
        return []
    latest = sorted((step for step, _ in bundles), reverse=True)

    def rank(bundle: tuple[int, float | None]) -> tuple[bool, float, int]:
        step, metric = bundle
        if metric is None or math.isnan(metric):
            return False, 0.0, step
        return True, metric if higher_is_better else -metric, step

    kept = {*protected, *latest[:1]}
    if ft_keep_latest_k is not None and ft_keep_latest_k >= 0:
        kept.update(latest[:ft_keep_latest_k])
    if keep_top_k is not None and keep_top_k >= 0:
        best = sorted(bundles, key=rank, reverse=True)
        kept.update(step for step, _ in best[:keep_top_k])
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
    for step in steps:
        try:
            metrics = _metrics(store, step)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as exc:
            failures.append(f"{bundle_name(step)} is left alone: {INFO}: {exc}")
        else:
            bundles.append((step, metrics.get(config.metric_name or "")))
    for step in to_prune(
        bundles,
        keep_top_k=config.keep_top_k,
        ft_keep_latest_k=config.ft_keep_latest_k,
        higher_is_better=config.higher_is_better,
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


def _metrics(store: BundleStore, step: int) -> dict[str, float | None]:
    file = store.directory / bundle_name(step) / INFO
    raw = store.disk.read(file, AT_MOST_BYTES[INFO])
    return msgspec.json.decode(raw, type=TrainingInfo).metrics
