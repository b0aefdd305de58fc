"""Public failures around bundles on disk, each under its name in the collection of cases."""

from __future__ import annotations

import ast
import errno
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from make_bundles import WRITTEN, reseal, save

import sc_core
from sc_core.bundle import LOCK, BundleStore
from sc_core.config import CheckpointingConfig
from sc_core.errors import BundleDamaged, NoValidBundle, RestoreError, SaveError
from sc_core.manifest import MANIFEST
from sc_core.retention import prune
from sc_core.testing.disk import Crashed, MemoryDisk
from sc_core.verify import VerifiedBundle, newest_valid, verify

DECODED = [name for name in WRITTEN if "/" not in name and name != MANIFEST]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    store = BundleStore(directory)
    store.open()
    for step in (2, 4, 6):
        save(store, step)
    store.close()
    (directory / "tmp_step_8").mkdir()
    shutil.copytree(directory / "step_6", directory / "tmp_step_8", dirs_exist_ok=True)
    return directory


@pytest.fixture
def bundles(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def refusals(directory: Path) -> tuple[VerifiedBundle | None, list[RestoreError]]:
    heard: list[RestoreError] = []
    found = newest_valid(directory, on_refused=lambda _, reason: heard.append(reason))
    return found, heard


# H15: the newest directory is incomplete ------------------------------------------------------


def missing(file: Path, other: Path) -> None:
    file.unlink()


def empty(file: Path, other: Path) -> None:
    file.write_bytes(b"")


def cut_at(part: float) -> Callable[[Path, Path], None]:
    def cut(file: Path, other: Path) -> None:
        raw = file.read_bytes()
        file.write_bytes(raw[: int(len(raw) * part)])

    cut.__name__ = f"cut_at_{part}"
    return cut


def last_byte_lost(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def one_byte_more(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def bit_flipped_at(part: float) -> Callable[[Path, Path], None]:
    def flip(file: Path, other: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[int((len(raw) - 1) * part)] ^= 1
        file.write_bytes(raw)

    flip.__name__ = f"bit_flipped_at_{part}"
    return flip


def swapped_with_another_step(file: Path, other: Path) -> None:
    ours, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(ours)
    assert ours != theirs


def copied_from_another_step(file: Path, other: Path) -> None:
    file.write_bytes(other.read_bytes())


DAMAGES = [
    missing,
    empty,
    *(cut_at(part) for part in (0.1, 0.5, 0.9)),
    last_byte_lost,
    one_byte_more,
    *(bit_flipped_at(part) for part in (0.0, 0.3, 0.7, 1.0)),
    copied_from_another_step,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", [n for n in WRITTEN if n != "config.yaml"])
def test_H15_any_damage_to_any_file_of_the_newest_falls_back_to_the_one_before(
    bundles: Path, name: str, damage: Callable[[Path, Path], None]
) -> None:
    damage(bundles / "step_6" / name, bundles / "step_4" / name)
    found, heard = refusals(bundles)
    assert found is not None
    assert found.step == 4
    (reason,) = heard
    assert isinstance(reason, BundleDamaged)
    assert reason.bundle == "step_6"
    if name == MANIFEST and damage is copied_from_another_step:
        assert reason.file in WRITTEN  # it is intact: the files it does not know are refused
    else:
        assert reason.file == name


@pytest.mark.parametrize("damage", DAMAGES[:-1], ids=lambda damage: damage.__name__)
def test_H15_nor_is_the_settings_file_spared(
    bundles: Path, damage: Callable[[Path, Path], None]
) -> None:
    damage(bundles / "step_6" / "config.yaml", bundles / "step_4" / "config.yaml")
    found, (reason,) = refusals(bundles)
    assert found is not None
    assert (found.step, str(reason).split(": ")[:2]) == (4, ["step_6", "config.yaml"])


@pytest.mark.parametrize("name", [n for n in WRITTEN if n != "config.yaml"])
def test_H15_files_mixed_from_two_steps_spoil_both(bundles: Path, name: str) -> None:
    swapped_with_another_step(bundles / "step_6" / name, bundles / "step_4" / name)
    found, heard = refusals(bundles)
    assert found is not None
    assert found.step == 2
    assert [str(reason).split(":")[0] for reason in heard] == ["step_6", "step_4"]


@pytest.mark.parametrize("name", ["data_plane", "policy"])
def test_H15_a_whole_component_is_missing(bundles: Path, name: str) -> None:
    shutil.rmtree(bundles / "step_6" / name)
    found, (reason,) = refusals(bundles)
    assert found is not None
    assert (found.step, str(reason)) == (4, f"step_6: {name}: missing")


@pytest.mark.parametrize("name", ["extra", "policy/extra", "data_plane/storage/su_1.bin"])
def test_H15_an_unknown_file_is_refused(bundles: Path, name: str) -> None:
    (bundles / "step_6" / name).touch()
    found, (reason,) = refusals(bundles)
    assert found is not None
    assert (found.step, str(reason).split(": ")[1]) == (4, name)


def test_H15_what_was_never_published_is_never_read(bundles: Path) -> None:
    found, heard = refusals(bundles)
    assert found is not None
    assert (found.step, heard) == (6, [])  # tmp_step_8 is whole, and newer
    for step in (2, 4, 6):
        shutil.rmtree(bundles / f"step_{step}")
    assert refusals(bundles) == (None, [])


def test_H15_no_valid_one_is_an_error_that_lists_them_not_a_fresh_start(bundles: Path) -> None:
    for step, name in ((2, MANIFEST), (4, "policy/weights.bin"), (6, "training_info.json")):
        (bundles / f"step_{step}" / name).unlink()
    with pytest.raises(NoValidBundle) as refused:
        newest_valid(bundles)
    message = str(refused.value)
    assert "step_2: MANIFEST.json: missing" in message
    assert "step_4: policy/weights.bin: missing" in message
    assert "step_6: training_info.json: missing" in message


# H16: names -----------------------------------------------------------------------------------

FOREIGN = ["step_10-hf", "step_0010", "step_1_0", "step_ 7", "step_-1", "step_٣", "step_x",
           "step_", "Step_10", "step_10 ", "step_+5", "step_" + "9" * 19, "notes"]  # fmt: skip


@pytest.fixture
def odd_names(tmp_path: Path) -> BundleStore:
    store = BundleStore(tmp_path / "checkpoints")
    store.open()
    for step, reward in ((8, 0.9), (9, 0.1), (10, 0.5)):
        save(store, step, metrics={"reward": reward})
    for name in FOREIGN:
        (store.directory / name).mkdir()
        (store.directory / name / "precious").touch()
    (store.directory / "tmp_step_11").mkdir()
    (store.directory / "step_12").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    (store.directory / "step_13").symlink_to(tmp_path / "elsewhere")
    return store


def bundles_left(store: BundleStore) -> list[int]:
    """Steps of the real bundles, once everything foreign proved untouched."""
    left = set(os.listdir(store.directory))
    assert left >= {*FOREIGN, "step_12", "step_13", LOCK}
    assert all((store.directory / name / "precious").exists() for name in FOREIGN)
    assert (store.directory / "step_13" / "precious").exists()
    return [step for step in (8, 9, 10) if f"step_{step}" in left]


def test_H16_the_latest_is_the_greatest_number_among_strict_names(odd_names: BundleStore) -> None:
    found, heard = refusals(odd_names.directory)
    assert found is not None
    assert (found.path.name, heard) == ("step_10", [])
    odd_names.close()
    odd_names.open()
    assert bundles_left(odd_names) == [8, 9, 10]


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (CheckpointingConfig(ft_keep_latest_k=2), [9, 10]),
        (CheckpointingConfig(ft_keep_latest_k=0), [10]),
        (CheckpointingConfig(ft_keep_latest_k=-1), [8, 9, 10]),
        (CheckpointingConfig(), [8, 9, 10]),
        (CheckpointingConfig(keep_top_k=1, metric_name="reward"), [8, 10]),
    ],
)
def test_H16_retention_deletes_bundles_only_and_never_the_last(
    odd_names: BundleStore, config: CheckpointingConfig, left: list[int]
) -> None:
    assert prune(odd_names, config) == []
    assert bundles_left(odd_names) == left


def test_H16_the_one_resumed_from_and_the_newest_valid_stay(odd_names: BundleStore) -> None:
    (odd_names.directory / "step_10" / "policy" / "weights.bin").unlink()
    fresh = BundleStore(odd_names.directory)
    odd_names.close()
    fresh.open()
    assert prune(fresh, CheckpointingConfig(ft_keep_latest_k=0), {8}) == []
    assert bundles_left(fresh) == [8, 9, 10]


def test_H16_deletion_follows_no_link(odd_names: BundleStore, tmp_path: Path) -> None:
    (odd_names.directory / "step_8" / "policy" / "link").symlink_to(tmp_path / "elsewhere")
    assert prune(odd_names, CheckpointingConfig(ft_keep_latest_k=1)) == []
    assert bundles_left(odd_names) == [10]
    assert (tmp_path / "elsewhere" / "precious").exists()


# H17: publishing or pruning fails ----------------------------------------------------------------

RUN = Path("/checkpoints")


@pytest.fixture
def store() -> Iterator[BundleStore]:
    store = BundleStore(RUN, disk=MemoryDisk())
    store.open()
    save(store, 2)
    yield store
    store.close()


def memory(store: BundleStore) -> MemoryDisk:
    assert isinstance(store.disk, MemoryDisk)
    return store.disk


def fail(effect: str, name: str, code: int) -> Callable[[str, Path], None]:
    def hook(what: str, path: Path) -> None:
        if what == effect and path.name == name:
            raise OSError(code, os.strerror(code), str(path))

    return hook


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_H17_a_failed_rename_is_raised_and_prunes_nothing(store: BundleStore, code: int) -> None:
    memory(store).hook = fail("rename", "tmp_step_4", code)
    with pytest.raises(SaveError, match=f"step_4.*{os.strerror(code)}"):
        save(store, 4)
    assert prune(store, CheckpointingConfig(ft_keep_latest_k=1)) == []
    latest = newest_valid(RUN, store.disk)
    assert latest is not None
    assert latest.step == 2
    memory(store).hook = None
    save(store, 4)
    assert verify(RUN / "step_4", store.disk).step == 4


@pytest.mark.parametrize("effect", ["rename", "sync_dir", "remove"])
def test_H17_a_failed_pruning_is_reported_and_the_new_bundle_stands(
    store: BundleStore, effect: str
) -> None:
    save(store, 4)
    name = {"rename": "step_2", "sync_dir": "checkpoints", "remove": "weights.bin"}[effect]
    memory(store).hook = fail(effect, name, errno.EIO)
    (failure,) = prune(store, CheckpointingConfig(ft_keep_latest_k=1))
    assert "step_2" in failure
    latest = newest_valid(RUN, store.disk)
    assert latest is not None
    assert latest.step == 4


def test_H17_killed_before_the_rename_the_next_save_of_that_step_works() -> None:
    clean = BundleStore(RUN, disk=MemoryDisk())
    clean.open()
    save(clean, 2)
    save(clean, 4)
    rename_at = memory(clean).effects - 1

    disk = MemoryDisk(crash_at=rename_at)
    store = BundleStore(RUN, disk=disk)
    store.open()
    save(store, 2)
    with pytest.raises(Crashed, match="rename"):
        save(store, 4)
    for seed in range(8):
        found = disk.after_crash(seed)
        latest = newest_valid(RUN, found)
        assert latest is not None
        if "step_4" in found.entries(RUN):
            assert latest.step == 4
            continue
        assert latest.step == 2
        again = BundleStore(RUN, disk=found)
        again.open()
        save(again, 4)
        assert verify(RUN / "step_4", found).step == 4


# H18: code in a checkpoint file -----------------------------------------------------------------


class Hostile:
    """Pickles to something that makes a marker when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def as_pickle(marker: Path) -> bytes:
    return pickle.dumps(Hostile(marker))


def as_torch_file(marker: Path) -> bytes:
    path = marker.with_suffix(".pt")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", as_pickle(marker))
        archive.writestr("archive/version", "3")
    return path.read_bytes()


def deep_json(marker: Path) -> bytes:
    return b'{"a":' * 200_000 + b"1" + b"}" * 200_000


def deep_list(marker: Path) -> bytes:
    return b"[" * 200_000 + b"]" * 200_000


def deep_msgpack(marker: Path) -> bytes:
    return b"\x91" * 200_000 + b"\xc0"


def promises_too_much(marker: Path) -> bytes:
    return b"\xdd\xff\xff\xff\xff"  # an array of four billion, none of them there


HOSTILE = [as_pickle, as_torch_file, deep_json, deep_list, deep_msgpack, promises_too_much]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    marker = tmp_path / "marker"
    pickle.loads(as_pickle(marker))
    assert marker.is_dir()
    marker.rmdir()
    return marker


@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("name", WRITTEN)
def test_H18_a_hostile_file_is_refused_by_name_and_never_run(
    bundles: Path, marker: Path, name: str, content: Callable[[Path], bytes]
) -> None:
    (bundles / "step_6" / name).write_bytes(content(marker))
    found, (reason,) = refusals(bundles)
    assert found is not None
    assert (found.step, str(reason).split(": ")[:2]) == (4, ["step_6", name])
    assert not marker.exists()


@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("name", DECODED)
def test_H18_nor_does_a_manifest_that_vouches_for_it_help(
    bundles: Path, marker: Path, name: str, content: Callable[[Path], bytes]
) -> None:
    (bundles / "step_6" / name).write_bytes(content(marker))
    reseal(bundles / "step_6")
    found, (reason,) = refusals(bundles)
    assert found is not None
    assert (found.step, str(reason).split(": ")[:2]) == (4, ["step_6", name])
    assert not marker.exists()


def test_H18_what_is_not_decoded_is_not_opened_as_anything(bundles: Path, marker: Path) -> None:
    (bundles / "step_6" / "policy" / "weights.bin").write_bytes(as_pickle(marker))
    reseal(bundles / "step_6")
    assert verify(bundles / "step_6").step == 6
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../../secret", "policy/../../../secret", "ABSOLUTE"])
def test_H18_a_manifest_can_not_point_outside(
    bundles: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    name = str(secret) if name == "ABSOLUTE" else name
    files = verify(bundles / "step_6").manifest.files
    reseal(bundles / "step_6", files={**files, name: files["config.yaml"]})
    opened: list[str] = []
    real_open = os.open

    def spy(path: Any, *args: Any, **options: Any) -> int:
        opened.append(os.path.abspath(os.fspath(path)))
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", spy)
    found, (reason,) = refusals(bundles)
    assert found is not None
    assert str(reason).startswith(f"step_6: MANIFEST.json: lists {name!r}")
    assert opened
    assert all(path.startswith(str(bundles)) for path in opened)


@pytest.mark.parametrize("name", [MANIFEST, *DECODED])
def test_H18_a_huge_file_is_not_read_into_memory(bundles: Path, name: str) -> None:
    files = verify(bundles / "step_6").manifest.files
    os.truncate(bundles / "step_6" / name, 1 << 36)  # sparse: takes no space
    if name != MANIFEST:
        vouched = {**files, name: msgspec.structs.replace(files[name], size=1 << 36)}
        reseal(bundles / "step_6", files=vouched)
    found, (reason,) = refusals(bundles)
    assert found is not None
    assert found.step == 4
    assert str(reason).startswith(f"step_6: {name}: can't be read: more than")


def test_H18_the_core_imports_no_pickle() -> None:
    (root,) = sc_core.__path__
    files = list(Path(root).rglob("*.py"))
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {"pickle", "dill", "cloudpickle", "shelve",
                                                  "marshal", "torch"}, file  # fmt: skip
