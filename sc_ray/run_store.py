"""The bundles of a run, and the name that its start goes by on this machine."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from sc_core import (
    BundleStore,
    RunInUse,
)
from sc_ray.run_directory import CHECKPOINTS

_ORPHANS_LIVE_S = 60.0
"""A killed driver's actor ends as soon as Ray's daemons, which die with the driver, are gone."""


def open_store(run_dir: Path) -> BundleStore:
    """The run's bundles, not opened yet. `SC_BUNDLE_KEY` signs their manifests, if it is set."""
    key = os.environ.get("SC_BUNDLE_KEY")
    return BundleStore(run_dir / CHECKPOINTS, key=key.encode() if key else None)


def run_id(run_dir: Path) -> str:
    """The same for every start of a run on this machine, so that a start finds leftovers."""
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]


def become_writer(store: BundleStore, say: Callable[[str], None]) -> None:
    """Open the store, once the processes of a driver that was killed have noticed and ended.

    Raises:
        RunInUse: they did not, within a minute.
        SaveError: its directory can't be written.
    """
    give_up = time.monotonic() + _ORPHANS_LIVE_S
    waiting = False
    while True:
        try:
            return store.open()
        except RunInUse:
            if time.monotonic() > give_up:
                raise
        if not waiting:
            say("waiting for the processes of an earlier start to end")
            waiting = True
        time.sleep(0.1)
