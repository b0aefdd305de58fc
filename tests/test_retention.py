from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_bundles import save

from sc_core.bundle import LOCK, BundleStore
from sc_core.config import CheckpointingConfig
from sc_core.retention import prune, to_prune
from sc_core.testing.disk import MemoryDisk

RUN = Path("/checkpoints")
NAN = float("nan")

# the rule -----------------------------------------------------------------------------------

BUNDLES = [(10, 0.5), (2, 0.9), (9, None), (4, NAN), (6, 0.7), (8, 0.7)]


@pytest.mark.parametrize(
    ("keep_top_k", "ft_keep_latest_k", "kept"),
    [
        (None, None, [2, 4, 6, 8, 9, 10]),
        (None, -1, [2, 4, 6, 8, 9, 10]),
        (-1, -1, [2, 4, 6, 8, 9, 10]),
        (None, 2, [9, 10]),
        (None, 1, [10]),
        (None, 0, [10]),
        (0, 0, [10]),
        (0, None, [10]),
        (1, None, [2, 10]),
        (2, None, [2, 8, 10]),
        (3, None, [2, 6, 8, 10]),
        (5, None, [2, 6, 8, 9, 10]),
        (1, 2, [2, 9, 10]),
        (99, 99, [2, 4, 6, 8, 9, 10]),
    ],
)
def test_what_is_kept(
    keep_top_k: int | None, ft_keep_latest_k: int | None, kept: list[int]
) -> None:
    pruned = to_prune(BUNDLES, keep_top_k=keep_top_k, ft_keep_latest_k=ft_keep_latest_k)
    assert pruned == [step for step in (2, 4, 6, 8, 9, 10) if step not in kept]


def test_lower_may_be_better() -> None:
    pruned = to_prune(BUNDLES, keep_top_k=1, ft_keep_latest_k=None, higher_is_better=False)
    assert pruned == [2, 4, 6, 8, 9]
    pruned = to_prune(BUNDLES, keep_top_k=4, ft_keep_latest_k=None, higher_is_better=False)
    assert pruned == [4, 9]


def test_protected_bundles_stay_beside_those_the_rules_keep() -> None:
    pruned = to_prune(BUNDLES, keep_top_k=1, ft_keep_latest_k=1, protected={4, 77})
    assert pruned == [6, 8, 9]


def test_infinite_metrics_have_their_place() -> None:
    bundles = [(1, math.inf), (2, -math.inf), (3, NAN), (4, 0.0)]
    assert to_prune(bundles, keep_top_k=1, ft_keep_latest_k=None) == [2, 3]
    assert to_prune(bundles, keep_top_k=3, ft_keep_latest_k=None) == [3]


@pytest.mark.parametrize(
    ("keep_top_k", "ft_keep_latest_k", "kept"),
    [
        (None, None, [2, 4, 6, 8, 9, 10]),
        (None, 1, [4, 8, 9, 10]),
        (None, 0, [4, 8, 9, 10]),
        (1, None, [2, 6, 8, 10]),
        (0, 2, [9, 10]),
        (1, 1, [8, 10]),
        (2, 1, [8, 9, 10]),
        (3, 1, [4, 8, 9, 10]),
    ],
)
def test_bundles_for_fault_tolerance_are_kept_by_their_own_rule(
    keep_top_k: int | None, ft_keep_latest_k: int | None, kept: list[int]
) -> None:
    """Of the others, 8 is best; 9 has no metric and that of 4 is no number."""
    pruned = to_prune(
        BUNDLES, keep_top_k=keep_top_k, ft_keep_latest_k=ft_keep_latest_k, ft_only={2, 6, 10}
    )
    assert pruned == [step for step in (2, 4, 6, 8, 9, 10) if step not in kept]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    bundles=st.lists(
        st.tuples(st.integers(0, 99), st.none() | st.floats()), unique_by=lambda b: b[0]
    ),
    top=st.none() | st.integers(-1, 5),
    latest=st.none() | st.integers(-1, 5),
    protected=st.sets(st.integers(0, 99), max_size=3),
    higher=st.booleans(),
)
def test_whatever_the_rules_the_newest_and_the_protected_stay(
    bundles: list[tuple[int, float | None]],
    top: int | None,
    latest: int | None,
    protected: set[int],
    higher: bool,
) -> None:
    pruned = to_prune(
        bundles,
        keep_top_k=top,
        ft_keep_latest_k=latest,
        higher_is_better=higher,
        protected=protected,
    )
    steps = [step for step, _ in bundles]
    assert pruned == sorted(set(pruned))
    assert set(pruned) <= set(steps) - protected
    if steps:
        assert max(steps) not in pruned
    kept = len(steps) - len(pruned)
    assert kept <= max(top or 0, 0) + max(latest or 0, 0) + len(protected) + 1 or (
        (top is None or top < 0) and (latest is None or latest < 0)
    )
    assert kept >= min(len(steps), max(top or 0, latest or 0))


# the deed -----------------------------------------------------------------------------------


@pytest.fixture
def store() -> BundleStore:
    store = BundleStore(RUN, disk=MemoryDisk())
    store.open()
    return store


def names(store: BundleStore) -> list[str]:
    return [name for name in store.disk.entries(RUN) if name != LOCK]


def test_the_metric_of_each_bundle_is_read_from_it(store: BundleStore) -> None:
    for step, reward in ((2, 0.9), (4, NAN), (6, 0.1), (8, 0.5)):
        save(store, step, metrics={"train/reward": reward})
    config = CheckpointingConfig(keep_top_k=1, metric_name="train/reward")
    assert prune(store, config) == []
    assert names(store) == ["step_2", "step_8"]
    low = CheckpointingConfig(keep_top_k=1, metric_name="train/reward", higher_is_better=False)
    save(store, 10, metrics={"train/reward": 3.0})
    assert prune(store, low, {2}) == []
    assert names(store) == ["step_10", "step_2", "step_8"]


def test_without_a_metric_the_newest_are_the_best(store: BundleStore) -> None:
    for step in (2, 4, 9, 10):
        save(store, step)
    assert prune(store, CheckpointingConfig(keep_top_k=2)) == []
    assert names(store) == ["step_10", "step_9"]


def test_by_default_nothing_is_deleted(store: BundleStore) -> None:
    for step in (2, 4):
        save(store, step)
    assert prune(store, CheckpointingConfig()) == []
    assert names(store) == ["step_2", "step_4"]


def test_bundles_of_later_steps_are_neither_counted_nor_deleted(store: BundleStore) -> None:
    for step in (1, 2, 8, 9):
        save(store, step)
    save(store, 3)
    assert prune(store, CheckpointingConfig(ft_keep_latest_k=2)) == []
    assert names(store) == ["step_2", "step_3", "step_8", "step_9"]


def test_before_anything_was_published_the_newest_valid_one_is_kept(store: BundleStore) -> None:
    for step in (2, 4, 6):
        save(store, step)
    store.disk.write(RUN / "step_6" / "policy" / "weights.bin", b"damaged")
    fresh = BundleStore(RUN, disk=store.disk)
    store.close()
    fresh.open()
    assert prune(fresh, CheckpointingConfig(ft_keep_latest_k=1)) == []
    assert names(fresh) == ["step_4", "step_6"]
    store.disk.write(RUN / "step_4" / "policy" / "weights.bin", b"damaged")
    (failure,) = prune(fresh, CheckpointingConfig(ft_keep_latest_k=1))
    assert failure.startswith("nothing was pruned: ")
    assert names(fresh) == ["step_4", "step_6"]


def test_a_bundle_that_can_not_be_ranked_is_reported_and_left_alone(store: BundleStore) -> None:
    for step in (2, 4, 6):
        save(store, step)
    store.disk.write(RUN / "step_2" / "training_info.json", b'{"step": 2')
    store.disk.remove_tree(RUN / "step_4" / "training_info.json")
    failures = prune(store, CheckpointingConfig(ft_keep_latest_k=1))
    assert [failure.partition(":")[0] for failure in failures] == [
        "step_4 is left alone",
        "step_2 is left alone",
    ]
    assert names(store) == ["step_2", "step_4", "step_6"]


def test_a_failed_deletion_is_reported_and_the_others_go_on(store: BundleStore) -> None:
    for step in (2, 4, 6):
        save(store, step)

    def hook(effect: str, path: Path) -> None:
        if effect == "rename" and path.name == "step_2":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    disk = store.disk
    assert isinstance(disk, MemoryDisk)
    disk.hook = hook
    (failure,) = prune(store, CheckpointingConfig(ft_keep_latest_k=1))
    assert "deleting /checkpoints/step_2 failed" in failure
    assert names(store) == ["step_2", "step_6"]


def test_a_step_is_taken_from_the_name_not_from_the_file(store: BundleStore) -> None:
    for step in (2, 4, 6):
        save(store, step)
    lie = store.disk.read(RUN / "step_4" / "training_info.json", 1 << 20)
    store.disk.write(RUN / "step_2" / "training_info.json", lie)
    assert prune(store, CheckpointingConfig(ft_keep_latest_k=2)) == []
    assert names(store) == ["step_4", "step_6"]
