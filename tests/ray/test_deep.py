"""`python -m sc_ray verify --deep`, on bundles that a real TransferQueue has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from sc_core.bundle import BundleStore
from sc_core.cut import cut_digest
from sc_core.errors import MissingRows
from sc_core.window import snapshot_metadata
from sc_ray.__main__ import DONE, FAILED, WRONG_USAGE, main
from sc_ray.deep import read_rows
from sc_ray.transfer_queue import TransferQueueBootstrap
from tests.make_bundles import make_cut


def save(bootstrap: TransferQueueBootstrap, run: Path, *, lost: int = 0) -> None:
    """Publish a bundle whose store lacks the last `lost` rows of its cut."""
    cut = make_cut()
    digest = cut_digest(cut)
    rows = [row for group in cut.groups for row in group.sample_ids]
    store = BundleStore(run / "checkpoints")
    store.open()
    staged = store.stage(cut.step)
    (staged.policy_dir / "weights").write_bytes(b"4")

    async def snapshot() -> None:
        plane = await anyio.to_thread.run_sync(bootstrap.spec.connect)
        await plane.clear_samples(await plane.list_sample_ids())  # of other tests
        full = rows[: len(rows) - lost]
        values = [torch.arange(3) for _ in full]
        await plane.put_samples(full, {"x": values, "y": [one.float() for one in values]})
        await plane.save_checkpoint(staged.data_plane_dir, snapshot_metadata(cut, digest))
        await plane.clear_samples(rows)
        await plane.aclose()

    anyio.run(snapshot)
    store.publish(staged, cut=cut, digest=digest, config={}, metrics={})
    store.close()


def test_a_bundle_whose_snapshot_is_what_the_cut_says(
    bootstrap: TransferQueueBootstrap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(bootstrap, tmp_path)
    assert main(["verify", "--deep", str(tmp_path), "--json"]) == DONE
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    (bundle,) = told["bundles"]
    counts = {name: bundle[name] for name in ("step", "groups", "rows", "suspects", "columns")}
    assert counts == {"step": 4, "groups": 1, "rows": 2, "suspects": 0, "columns": 2}
    assert bundle["bytes"] == 2 * 3 * (8 + 4)


def test_a_row_that_is_missing_from_a_snapshot_whose_hashes_match(
    bootstrap: TransferQueueBootstrap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(bootstrap, tmp_path, lost=1)
    assert main(["verify", str(tmp_path / "checkpoints" / "step_4")]) == DONE
    assert capsys.readouterr().out.startswith("step_4: ok; step 4, digest ")
    assert main(["verify", "--deep", str(tmp_path / "checkpoints" / "step_4")]) == FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "sc_ray: error: step_4: data_plane: the store and the cut disagree: 1 rows missing"
        " (10.0_g1), 0 unexpected ()\n"
    )


def test_a_row_that_is_listed_and_has_no_data(bootstrap: TransferQueueBootstrap) -> None:
    cut = make_cut()
    (group,) = cut.groups

    async def put_and_read() -> None:
        plane = await anyio.to_thread.run_sync(bootstrap.spec.connect)
        await plane.clear_samples(await plane.list_sample_ids())  # of other tests
        await plane.put_samples(group.sample_ids[:1], {"x": [torch.arange(3)]})
        await plane.put_samples(group.sample_ids[1:], {}, [{}])
        try:
            with pytest.raises(MissingRows, match="^1 rows are not in the data plane: 10.0_g1$"):
                await read_rows(cut, bootstrap, 2)
        finally:
            await plane.clear_samples(group.sample_ids)
            await plane.aclose()

    anyio.run(put_and_read)


def test_damage_is_found_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a damaged snapshot was opened")

    monkeypatch.setattr("sc_ray.deep.look_inside", never)
    bundle = tmp_path / "checkpoints" / "step_4"
    bundle.mkdir(parents=True)
    assert main(["verify", "--deep", str(tmp_path)]) == FAILED
    assert capsys.readouterr().err.startswith("sc_ray: error: step_4: ")


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--deep", str(tmp_path / "none")]) == WRONG_USAGE
    assert "none: there is no such directory" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    assert main(["verify", "--deep", str(tmp_path)]) == FAILED
    assert "holds no checkpoints" in capsys.readouterr().err
