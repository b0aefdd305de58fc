"""Every damage to every file of a bundle that a run saved: refused by name, or of no effect."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest
from bundle_corpus import corpus, judge
from lives import settings

from sc_core.bundle import BundleStore
from sc_core.calls import inline
from sc_core.disk import LOCAL
from sc_core.restore import restore
from sc_core.testing import MemoryRun
from sc_core.testing.data_plane import MemoryBootstrap, MemoryStore

CONFIG = settings("windowed", p=2, k=2, steps=6, checkpointing={"save_period": 2})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    prompts = [{"question": f"{n} + 1?"} for n in range(100)]
    run = MemoryRun(CONFIG, prompts, directory=directory)
    run.disk = LOCAL  # type: ignore[assignment]
    run.start_life()
    anyio.run(run.run)
    (directory / "run.lock").unlink(missing_ok=True)
    return directory


async def resume(directory: Path) -> int | None:
    """What a run would go on from."""
    bundles = BundleStore(directory)
    bundles.open()
    try:
        ready = await restore(bundles, MemoryBootstrap(MemoryStore()), CONFIG, runner=inline)
    finally:
        bundles.close()
    return None if ready.bundle is None else ready.bundle.step


def test_h15_h18_every_damage_is_refused_by_name_and_the_bundle_before_is_resumed(
    pristine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    marker = tmp_path / "marker"

    def resumed(directory: Path) -> int | None:
        return anyio.run(resume, directory)

    verdicts: Counter[str] = Counter()
    wrong: list[str] = []
    for case in corpus(pristine, marker):
        try:
            verdict = judge(case, pristine, tmp_path / "scratch", marker, resumed)
        except AssertionError as exc:
            wrong.append(str(exc).splitlines()[0])
        else:
            verdicts[verdict] += 1
    with capsys.disabled():
        pytestconfig.get_terminal_writer().line(
            f"\ncorpus: {verdicts.total()} damaged bundles: {verdicts['refused']} refused by"
            f" name, {verdicts['harmless']} unchanged in content; {len(wrong)} went wrong"
        )
    assert not wrong, "\n".join(wrong)
    assert verdicts["refused"] >= 500
    assert verdicts["harmless"] <= 4
