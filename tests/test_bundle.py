from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from make_bundles import FILES, NOW, WRITTEN, fill, make_cut, save

from sc_core import manifest
from sc_core.bundle import LOCK, BundleStore
from sc_core.config import CheckpointingConfig
from sc_core.cut import cut_digest, decode_cut
from sc_core.errors import RunInUse, SaveError
from sc_core.retention import prune
from sc_core.testing.disk import Crashed, MemoryDisk
from sc_core.verify import candidates, newest_valid, verify

RUN = Path("/runs/demo/checkpoints")
SEEDS = range(6)


def open_store(disk: MemoryDisk) -> BundleStore:
    store = BundleStore(RUN, disk=disk, now=lambda: NOW)
    store.open()
    return store


def failing(effect: str, at: str, code: int = errno.EIO, skip: int = 0) -> Callable[..., None]:
    """A hook: `effect` on a path that ends in `at` fails, but for the first `skip` times."""
    seen = []

    def hook(what: str, path: Path) -> None:
        if what == effect and str(path).endswith(at):
            seen.append(path)
            if len(seen) > skip:
                raise OSError(code, os.strerror(code), str(path))

    return hook


# what a save leaves -----------------------------------------------------------------------


def test_a_bundle_on_a_real_disk_has_its_files_and_nobody_else_can_touch_them(
    tmp_path: Path,
) -> None:
    store = BundleStore(tmp_path / "runs" / "checkpoints", now=lambda: NOW)
    store.open()
    path = save(store, 4, metrics={"train/reward": 0.5, "loss": float("nan")})
    assert path == tmp_path / "runs" / "checkpoints" / "step_4"
    assert sorted(os.listdir(path.parent)) == [LOCK, "step_4"]
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert found == set(WRITTEN)
    for one in [path.parent, path, *path.rglob("*")]:
        assert not one.stat().st_mode & 0o022, one
    assert path.stat().st_mode & 0o777 == 0o700

    cut = make_cut(4)
    assert decode_cut((path / "replay_buffer_metadata.msgpack").read_bytes()) == cut
    position = msgspec.msgpack.decode((path / "train_dataloader.msgpack").read_bytes())
    assert position == {
        "type": "position.v1",
        "position": cut.position,
        "fingerprint": "prompts-v1",
        "next_ordinal": cut.next_ordinal,
        "exhausted": False,
    }
    assert json.loads((path / "config.yaml").read_text()) == {"grpo": {"seed": 0}}
    assert json.loads((path / "training_info.json").read_text()) == {
        "schema": "training_info.v1",
        "step": 4,
        "weight_version": 4,
        "group_size": 2,
        "prompts_per_step": 2,
        "incarnation": "first",
        "event_seq": 40,
        "created": NOW,
        "counters": {"trained": 8, "dropped": 0},
        "metrics": {"train/reward": 0.5, "loss": None},
        "ft_only": False,
    }
    sealed = json.loads((path / "MANIFEST.json").read_text())
    assert sealed["hmac_sha256"] is None
    assert sealed["manifest"]["step"] == 4
    assert sealed["manifest"]["cut_digest"] == cut_digest(cut)
    assert set(sealed["manifest"]["files"]) == set(WRITTEN) - {"MANIFEST.json"}
    assert store.published == 4


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_second_save_of_a_step_replaces_the_first_and_leaves_nothing_beside_it(
    exchanges: bool,
) -> None:
    disk = MemoryDisk(exchanges=exchanges)
    store = open_store(disk)
    save(store, 4, "old")
    save(store, 4, "new")
    assert list(disk.entries(RUN)) == [LOCK, "step_4"]
    found = newest_valid(RUN, disk)
    assert found is not None
    assert found.info.incarnation == "new"


def test_replacing_works_on_a_real_disk(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    store.open()
    save(store, 4, "old")
    save(store, 4, "new")
    assert sorted(os.listdir(tmp_path)) == [LOCK, "step_4"]
    assert verify(tmp_path / "step_4").info.incarnation == "new"


def test_the_manifest_is_written_last() -> None:
    effects: list[tuple[str, str]] = []
    disk = MemoryDisk()
    store = open_store(disk)
    disk.hook = lambda effect, path: effects.append((effect, path.name))
    save(store, 4)
    writes = [name for effect, name in effects if effect == "write"]
    assert writes[-1] == "MANIFEST.json"
    assert sorted(writes) == sorted(Path(name).name for name in WRITTEN)
    assert effects[-2:] == [("rename", "tmp_step_4"), ("sync_dir", "checkpoints")]
    synced = [name for effect, name in effects if effect == "sync"]
    assert sorted(synced) == sorted(writes)


def test_a_key_signs_the_manifest() -> None:
    disk = MemoryDisk()
    store = BundleStore(RUN, disk=disk, key=b"secret")
    store.open()
    save(store, 4)
    sealed = json.loads(disk.read(RUN / "step_4" / "MANIFEST.json", 1 << 20))
    assert len(sealed["hmac_sha256"]) == 64


# the directory ------------------------------------------------------------------------------


def test_one_directory_has_one_writer(tmp_path: Path) -> None:
    first, second = BundleStore(tmp_path), BundleStore(tmp_path)
    first.open()
    first.open()
    with pytest.raises(RunInUse, match=f"pid {os.getpid()}"):
        second.open()
    first.close()
    first.close()
    second.open()
    with pytest.raises(SaveError, match="not open for writing"):
        first.stage(4)


def test_a_store_that_fails_to_open_lets_others_in() -> None:
    disk = MemoryDisk(exchanges=False)
    store = open_store(disk)
    save(store, 4)
    disk.rename(RUN / "step_4", RUN / "old_step_4")
    store.close()
    disk.hook = failing("rename", "old_step_4")
    with pytest.raises(SaveError, match="recovering"):
        store.open()
    disk.hook = None
    store.open()
    assert "step_4" in disk.entries(RUN)


def test_a_replaced_lock_file_stops_the_publication() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    staged = fill(store, 4)
    disk.write(RUN / "other", b"")
    disk.rename(RUN / "other", RUN / LOCK)
    cut = make_cut()
    with pytest.raises(SaveError, match="lock file"):
        store.publish(staged, cut=cut, digest=cut_digest(cut), config={}, metrics={})
    assert "step_4" not in disk.entries(RUN)


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SaveError, match=f"chmod go-w {tmp_path}"):
        BundleStore(tmp_path).open()
    assert os.listdir(tmp_path) == []


def test_a_link_to_the_directory_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    store = BundleStore(tmp_path / "link")
    store.open()
    assert save(store, 4) == tmp_path / "real" / "step_4"
    found = newest_valid(tmp_path / "link")
    assert found is not None
    assert found.path == tmp_path / "real" / "step_4"


def test_opening_tidies_up_what_is_ours_and_leaves_what_is_foreign(tmp_path: Path) -> None:
    ours = ["tmp_step_8", "trash_step_2", "old_step_4"]
    foreign = ["tmp_step_08", "trash", "old_step_x", "step_4-hf", ".probe2", "notes"]
    store = BundleStore(tmp_path)
    store.open()
    save(store, 4)
    store.close()
    for name in [*ours, *foreign]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "tmp_step_9").touch()
    (tmp_path / "tmp_step_10").symlink_to("notes")
    store.open()
    kept = [*foreign, LOCK, "step_4", "tmp_step_9", "tmp_step_10"]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert (tmp_path / "notes" / "file").exists()


def test_a_bundle_moved_aside_gets_its_name_back() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    save(store, 4)
    store.close()
    disk.rename(RUN / "step_4", RUN / "old_step_4")
    aside = newest_valid(RUN, disk)
    assert aside is not None
    assert (aside.step, aside.path.name) == (4, "old_step_4")
    store.open()
    back = newest_valid(RUN, disk)
    assert back is not None
    assert back.path.name == "step_4"


def test_staging_says_how_much_is_needed_and_free() -> None:
    disk = MemoryDisk(free=100_000)
    store = open_store(disk)
    save(store, 4)
    needed = store.expected_bytes
    assert needed == sum(
        disk.size(RUN / "step_4" / name) for name in WRITTEN if name != manifest.MANIFEST
    )
    disk.free = needed
    store.stage(5)
    disk.free = needed - 1
    message = f"has {needed - 1:,} bytes free and a bundle needs about {needed:,}; free 1 bytes"
    with pytest.raises(SaveError, match=message):
        store.stage(6)
    assert set(disk.entries(RUN)) == {LOCK, "step_4", "tmp_step_5"}
    disk.free = needed
    disk.hook = failing("make_dir", "tmp_step_5", errno.EROFS)
    with pytest.raises(SaveError, match="read-only: choose another directory"):
        store.stage(5)


# what is refused --------------------------------------------------------------------------


def test_a_file_in_the_way_of_a_bundle_is_named(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    store.open()
    staged = fill(store, 4)
    (tmp_path / "step_4").touch()
    with pytest.raises(SaveError, match="step_4 is in the way"):
        store.stage(4)
    cut = make_cut()
    staged = fill(store, 5)
    (tmp_path / "step_5").touch()
    cut = make_cut(5)
    with pytest.raises(SaveError, match="step_5 is in the way"):
        store.publish(staged, cut=cut, digest=cut_digest(cut), config={}, metrics={})
    assert (tmp_path / "step_5").is_file()


def test_what_could_not_be_read_back_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    store = open_store(disk)

    def publish(cut: Any, digest: str | None = None, config: Any = None) -> None:
        staged = fill(store, 4)
        digest = digest or cut_digest(cut)
        store.publish(staged, cut=cut, digest=digest, config=config or {}, metrics={})

    deep: Any = "payload"
    for _ in range(manifest.MAX_NESTING):
        deep = [deep]
    publish(make_cut(payload=deep))
    assert newest_valid(RUN, disk) is not None
    with pytest.raises(SaveError, match="flatten it"):
        publish(make_cut(payload=[deep]))
    with pytest.raises(SaveError, match="flatten it"):
        publish(make_cut(), config={"deep": [deep]})
    with pytest.raises(SaveError, match="can't be encoded"):
        publish(make_cut(payload=object()), digest="unknown")
    with pytest.raises(SaveError, match="staged for step 4, not 5"):
        publish(make_cut(5))
    with pytest.raises(SaveError, match="has digest"):
        publish(make_cut(), digest=cut_digest(make_cut(5)))
    monkeypatch.setitem(manifest.AT_MOST_BYTES, "config.yaml", 4)  # type: ignore[misc]
    with pytest.raises(SaveError, match=r"config.yaml would have \d+ bytes"):
        publish(make_cut(), config={"a": 1})
    assert list(disk.entries(RUN)) == [LOCK, "step_4", "tmp_step_4"]


def test_only_private_regular_files_are_sealed(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    store.open()
    cut = make_cut()

    def publish(spoil: Callable[[Path], Any]) -> None:
        staged = fill(store, 4)
        spoil(staged.path)
        store.publish(staged, cut=cut, digest=cut_digest(cut), config={}, metrics={})

    with pytest.raises(SaveError, match=r"policy/link is a symbolic link"):
        publish(lambda path: (path / "policy" / "link").symlink_to("/etc/passwd"))
    with pytest.raises(SaveError, match=r"policy/pipe is no regular file"):
        publish(lambda path: os.mkfifo(path / "policy" / "pipe"))
    with pytest.raises(SaveError, match="printable"):
        publish(lambda path: (path / "policy" / "a\nb").touch())
    with pytest.raises(SaveError, match="directories deep"):
        publish(lambda path: os.makedirs(path / "policy" / "/".join("d" * 40)))
    with pytest.raises(SaveError, match="the data plane saved nothing"):
        publish(lambda path: os.rename(path / "data_plane", path / "policy" / "elsewhere"))
    if os.geteuid() == 0:
        with pytest.raises(SaveError, match="belongs to another user"):
            publish(lambda path: os.chown(path / "policy" / "weights.bin", 12345, -1))
    assert newest_valid(tmp_path) is None

    def open_to_all(path: Path) -> None:
        for one in (path, *path.rglob("*")):
            one.chmod(0o777 if one.is_dir() else 0o666)

    publish(open_to_all)
    assert verify(tmp_path / "step_4").step == 4


def test_settings_of_any_type_are_shown_and_cost_no_checkpoint() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    cut = make_cut()
    config = {"out": Path("runs/demo"), "lr": 1e-5}
    store.publish(fill(store, 4), cut=cut, digest=cut_digest(cut), config=config, metrics={})
    assert verify(RUN / "step_4", disk).config == {"out": "runs/demo", "lr": 1e-5}


def test_a_failed_write_names_the_file_and_the_way_out() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    disk.hook = failing("write", "training_info.json", errno.ENOSPC)
    with pytest.raises(SaveError, match=r"training_info.json: No space left.*free some space"):
        save(store, 4)
    disk.hook = failing("sync", "vocab.json")
    with pytest.raises(SaveError, match=r"sealing .*vocab.json"):
        save(store, 4)
    disk.hook = None
    assert newest_valid(RUN, disk) is None
    save(store, 4)
    assert newest_valid(RUN, disk) is not None


@pytest.mark.parametrize("skip", [0, 1])
def test_a_failed_rename_gives_the_old_bundle_its_name_back(skip: int) -> None:
    disk = MemoryDisk(exchanges=False)
    store = open_store(disk)
    save(store, 4, "old")
    disk.hook = failing("rename", "step_4", skip=skip)  # `step_4` itself, then `tmp_step_4`
    if skip:
        disk.hook = failing("rename", "tmp_step_4")
    with pytest.raises(SaveError, match="publishing"):
        save(store, 4, "new")
    disk.hook = None
    assert "step_4" in disk.entries(RUN)
    found = newest_valid(RUN, disk)
    assert found is not None
    assert found.info.incarnation == "old"
    save(store, 4, "newer")
    assert verify(RUN / "step_4", disk).info.incarnation == "newer"
    assert list(disk.entries(RUN)) == [LOCK, "step_4"]


def test_what_is_published_is_not_written_to_again() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    save(store, 4, "old")
    staged = fill(store, 4, "new")
    cut = make_cut(4, "new")
    parts: dict[str, Any] = {
        "cut": cut, "digest": cut_digest(cut), "config": {}, "metrics": {},
    }  # fmt: skip
    disk.hook = failing("sync_dir", "checkpoints")
    with pytest.raises(SaveError):
        store.publish(staged, **parts)  # exchanged: tmp_step_4 now is the old bundle
    disk.hook = None
    with pytest.raises(SaveError, match="published already"):
        store.publish(staged, **parts)
    with pytest.raises(SaveError):
        staged.seal()
    found = newest_valid(RUN, disk)
    assert found is not None
    assert found.info.incarnation == "new"


def test_leftovers_do_not_fail_a_publication(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    save(store, 4, "old")
    disk.hook = failing("remove", "config.yaml")
    with caplog.at_level(logging.WARNING):
        save(store, 4, "new")
    assert "left beside it" in caplog.text
    assert verify(RUN / "step_4", disk).info.incarnation == "new"
    disk.hook = None
    store.close()
    store.open()
    assert list(disk.entries(RUN)) == [LOCK, "step_4"]


def replaced_and_left_aside(disk: MemoryDisk) -> BundleStore:
    """A store whose `step_4` is new, with the old one beside it because deleting it failed."""
    store = open_store(disk)
    save(store, 4, "old")
    disk.hook = failing("remove", "old_step_4/config.yaml")
    save(store, 4, "new")
    disk.hook = None
    assert "old_step_4" in disk.entries(RUN)
    return store


def test_what_was_left_aside_is_in_nobodys_way() -> None:
    disk = MemoryDisk(exchanges=False)
    store = replaced_and_left_aside(disk)
    save(store, 4, "newer")
    assert list(disk.entries(RUN)) == [LOCK, "step_4"]
    assert verify(RUN / "step_4", disk).info.incarnation == "newer"


def test_what_was_left_aside_does_not_come_back_when_its_step_is_deleted() -> None:
    clean = MemoryDisk(exchanges=False)
    store = replaced_and_left_aside(clean)
    first = clean.effects
    store.discard(4)
    assert list(clean.entries(RUN)) == [LOCK]
    for crash_at in range(first + 1, clean.effects + 1):
        disk = MemoryDisk(exchanges=False, crash_at=crash_at)
        store = replaced_and_left_aside(disk)
        with pytest.raises(Crashed):
            store.discard(4)
        for seed in range(12):
            found = disk.after_crash(seed)
            open_store(found)
            assert incarnation(found) in ("new", None), (crash_at, seed)


def test_trash_is_in_nobodys_way() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    save(store, 4)
    disk.hook = failing("remove", "trash_step_4/config.yaml")
    with pytest.raises(SaveError):
        store.discard(4)
    disk.hook = None
    save(store, 4)
    store.discard(4)
    assert list(disk.entries(RUN)) == [LOCK]


def test_discarding_takes_the_name_before_the_files() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    save(store, 4)
    save(store, 5)
    disk.hook = failing("remove", "weights.bin")
    with pytest.raises(SaveError, match="deleting"):
        store.discard(4)
    assert list(disk.entries(RUN)) == [LOCK, "step_5", "trash_step_4"]
    disk.hook = None
    with pytest.raises(SaveError, match="deleting"):
        store.discard(4)


# crashes ------------------------------------------------------------------------------------


def effects_between(before: Callable[[BundleStore], Any], after: Callable[[BundleStore], Any],
                    exchanges: bool) -> range:  # fmt: skip
    disk = MemoryDisk(exchanges=exchanges)
    store = open_store(disk)
    before(store)
    first = disk.effects
    after(store)
    return range(first + 1, disk.effects + 1)


def crash(before: Callable[[BundleStore], Any], after: Callable[[BundleStore], Any],
          crash_at: int, exchanges: bool) -> MemoryDisk:  # fmt: skip
    disk = MemoryDisk(crash_at=crash_at, exchanges=exchanges)
    store = open_store(disk)
    before(store)
    with pytest.raises(Crashed):
        after(store)
    return disk


def incarnation(disk: MemoryDisk) -> str | None:
    found = newest_valid(RUN, disk)
    return None if found is None else found.info.incarnation


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_crash_in_a_save_over_an_existing_step_leaves_the_old_or_the_new(
    exchanges: bool,
) -> None:
    def old(store: BundleStore) -> None:
        save(store, 4, "old")

    def new(store: BundleStore) -> None:
        save(store, 4, "new")

    seen = set()
    for crash_at in effects_between(old, new, exchanges):
        dead = crash(old, new, crash_at, exchanges)
        for seed in SEEDS:
            found = dead.after_crash(seed)
            before_open = incarnation(found)
            store = open_store(found)
            assert incarnation(found) == before_open
            assert before_open in ("old", "new"), (crash_at, seed)
            seen.add(before_open)
            names = set(found.entries(RUN))
            assert names <= {LOCK, "step_4"}, (crash_at, seed)
            save(store, 4, "third")
            assert incarnation(found.after_crash(seed)) == "third"
    assert seen == {"old", "new"}


def test_a_crash_in_the_first_save_leaves_nothing_or_all_of_it() -> None:
    def nothing(store: BundleStore) -> None:
        pass

    def first(store: BundleStore) -> None:
        save(store, 4, "first")

    seen = set()
    for crash_at in effects_between(nothing, first, True):
        dead = crash(nothing, first, crash_at, True)
        for seed in SEEDS:
            found = dead.after_crash(seed)
            seen.add(incarnation(found))
            open_store(found)
            seen.add(incarnation(found))
    assert seen == {None, "first"}


def test_a_crash_in_the_recovery_from_a_crash_loses_nothing() -> None:
    def old(store: BundleStore) -> None:
        save(store, 4, "old")

    def new(store: BundleStore) -> None:
        save(store, 4, "new")

    recovered = 0
    for crash_at in effects_between(old, new, False)[-20:]:
        dead = crash(old, new, crash_at, False)
        for seed in SEEDS[:3]:
            clean = dead.after_crash(seed)
            open_store(clean)
            for second_at in range(1, clean.effects + 1):
                disk = dead.after_crash(seed)
                disk.crash_at = second_at
                with pytest.raises(Crashed):
                    open_store(disk)
                found = disk.after_crash(seed + second_at)
                assert incarnation(found) in ("old", "new")
                open_store(found)
                assert incarnation(found) in ("old", "new")
                recovered += 1
    assert recovered > 50


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("change", ["replace", "discard"])
def test_a_power_cut_in_the_recovery_from_a_kill_leaves_bundles_whole_or_gone(
    change: str, exchanges: bool
) -> None:
    """What a kill left renamed is not durable yet: no file may go before its new name stays."""

    def killed_at(rename: int) -> MemoryDisk | None:
        disk = MemoryDisk(exchanges=exchanges)
        store = open_store(disk)
        save(store, 2)
        save(store, 4, "old")
        left: list[MemoryDisk] = []

        def done(what: str, path: Path) -> None:
            if what in ("exchange", "rename"):
                left.append(disk.after_kill())

        disk.done = done
        if change == "replace":
            save(store, 4, "new")
        else:
            store.discard(2)
        return left[rename] if rename < len(left) else None

    recovered = 0
    for rename in range(4):
        killed = killed_at(rename)
        if killed is None:
            break
        clean = killed.after_kill()
        open_store(clean)
        for crash_at in range(1, clean.effects + 1):
            disk = killed.after_kill()
            disk.crash_at = crash_at
            with pytest.raises(Crashed):
                open_store(disk)
            for seed in range(24):
                found = disk.after_crash(seed)
                assert incarnation(found) in ("old", "new")
                for path in candidates(RUN, found):
                    verify(path, found)
                open_store(found)
                assert incarnation(found) in ("old", "new")
                recovered += 1
    assert recovered > 50


def test_staging_again_after_a_publication_that_was_not_synced_loses_nothing() -> None:
    for crash_at in range(1, 14):
        disk = MemoryDisk()
        store = open_store(disk)
        save(store, 4, "old")
        disk.hook = failing("sync_dir", RUN.name)
        with pytest.raises(SaveError):
            save(store, 4, "new")
        disk.hook = None
        disk.crash_at = disk.effects + crash_at
        with pytest.raises(Crashed):
            store.stage(4)
        assert {incarnation(disk.after_crash(seed)) for seed in range(24)} <= {"old", "new"}


def test_a_crash_while_pruning_leaves_bundles_whole_or_gone() -> None:
    config = CheckpointingConfig(ft_keep_latest_k=1)

    def three(store: BundleStore) -> None:
        for step in (2, 4, 6):
            save(store, step)

    def pruned(store: BundleStore) -> None:
        assert prune(store, config) == []

    for crash_at in effects_between(three, pruned, True):
        dead = crash(three, pruned, crash_at, True)
        for seed in SEEDS:
            found = dead.after_crash(seed)
            steps = [name for name in found.entries(RUN) if name.startswith("step_")]
            assert "step_6" in steps
            for name in steps:
                verify(RUN / name, found)
            open_store(found)
            assert set(found.entries(RUN)) == {LOCK, *steps}


def test_the_files_of_trainer_and_data_plane_are_made_durable() -> None:
    disk = MemoryDisk()
    save(open_store(disk), 4)
    for seed in SEEDS:
        found = disk.after_crash(seed)
        for name, content in FILES.items():
            assert found.read(RUN / "step_4" / name, 99) == content + b"4 first"
