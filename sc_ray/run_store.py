"""The bundles of a run, and the name that its start goes by on this machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from sc_core import (
    BundleStore,
)
from sc_ray.run_directory import CHECKPOINTS


def open_store(run_dir: Path) -> BundleStore:
    """The run's bundles, not opened yet. `SC_BUNDLE_KEY` signs their manifests, if it is set."""
    key = os.environ.get("SC_BUNDLE_KEY")
    return BundleStore(run_dir / CHECKPOINTS, key=key.encode() if key else None)


def run_id(run_dir: Path) -> str:
    """The same for every start of a run on this machine, so that a start finds leftovers."""
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
