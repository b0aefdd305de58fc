"""Opens a bundle's snapshot of the data plane and compares it with the cut it belongs to.

A manifest proves that the files are those that were written; this proves that TransferQueue can
still make of them what the cut says. It happens in a process of its own, with a Ray and a
TransferQueue of its own: a snapshot consists of pickles, and nothing of it stays.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from sc_core import (
    Cut,
    DataPlaneError,
    ScError,
    VerifiedBundle,
    check_store,
    verify,
)
from sc_ray.kills import kill_tree

if TYPE_CHECKING:  # torch comes with it, and takes its seconds
    from sc_ray.transfer_queue import TransferQueueBootstrap


class DeepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a bundle's snapshot holds, or the first thing that is wrong with it."""

    error: str | None = None
    groups: int = 0
    rows: int = 0
    suspects: int = 0  #: rows that belong to no group and were to be cleared
    columns: Sequence[str] = ()  #: of any row, sorted
    bytes: int = 0  #: of all values


def look_inside(bundle: Path) -> DeepReport:
    """Have a child process compare a bundle's snapshot with its cut. Blocks, for some 20 s.

    Verify the bundle first: the child does so again, but only after a slow start.

    Raises:
        ScError: the child ended without an answer.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "sc_ray.deep", str(bundle)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        answer, complaint = child.communicate()
    finally:
        if child.poll() is None:  # somebody lost patience with it
            kill_tree(child.pid)
            child.wait()
    if child.returncode != 0 or not answer.strip():
        last = (complaint.decode(errors="replace").splitlines() or ["nothing"])[-1]
        raise ScError(
            f"{bundle}: the process that opens its data_plane ended with status"
            f" {child.returncode}; it last said: {last}"
        )
    return msgspec.json.decode(answer.splitlines()[-1], type=DeepReport)


def main() -> int:
    """In the child: the report, as the last line of stdout."""
    try:
        report = _examine(verify(Path(sys.argv[1]), key=_key()))
    except ScError as exc:
        told = " ".join(str(exc).split())
        name = Path(sys.argv[1]).name
        report = DeepReport(error=told if name in told else f"{name}: data_plane: {told}")
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    return 0


def _examine(bundle: VerifiedBundle) -> DeepReport:
    from sc_ray.cluster import start_local_ray
    from sc_ray.partition import units_of
    from sc_ray.transfer_queue import TransferQueueBootstrap, TransferQueueSpec

    units = units_of(bundle.data_plane_dir)
    with ExitStack() as on_exit:
        start_local_ray(units + 1, on_exit)
        store = on_exit.enter_context(
            TransferQueueBootstrap(TransferQueueSpec(storage_units=units))
        )

        async def compare() -> DeepReport:
            metadata = await store.load_checkpoint(bundle.data_plane_dir)
            listed = await store.list_sample_ids()
            check_store(bundle, metadata, listed)
            return await read_rows(bundle.cut, store, len(listed))

        return anyio.run(compare)


async def read_rows(cut: Cut, store: TransferQueueBootstrap, listed: int) -> DeepReport:
    """Read every column of every row that a group owns, in a store that lists so many.

    Raises:
        DataPlaneError: a row has no data, or a column can't be read; names the first.
    """
    names: set[str] = set()
    rows = size = 0
    for group in cut.groups:
        columns = await store.get_rows(group.sample_ids)
        for name, values in columns.items():
            if len(values) != len(group.sample_ids):
                raise DataPlaneError(
                    f"group {group.group_id} has {len(group.sample_ids)} rows and column {name}"
                    f" {len(values)}"
                )
            size += sum(value.numel() * value.element_size() for value in values)
        names |= columns.keys()
        rows += len(group.sample_ids)
    return DeepReport(
        groups=len(cut.groups),
        rows=rows,
        suspects=listed - rows,
        columns=sorted(names),
        bytes=size,
    )


def _key() -> bytes | None:
    return os.environ.get("SC_BUNDLE_KEY", "").encode() or None


if __name__ == "__main__":
    sys.exit(main())
