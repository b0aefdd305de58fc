from __future__ import annotations

import copy
import errno
import json
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from make_bundles import WRITTEN, make_cut, reseal, save

from sc_core import manifest
from sc_core.bundle import BundleStore
from sc_core.cut import cut_digest, encode_cut
from sc_core.errors import (
    BundleDamaged,
    BundleInconsistent,
    NoValidBundle,
    RestoreError,
    RestoreOrderError,
)
from sc_core.testing.disk import MemoryDisk
from sc_core.verify import VerifiedBundle, candidates, newest_valid, verify


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    store = BundleStore(directory)
    store.open()
    for step in (2, 4):
        save(store, step)
    store.close()
    return directory


@pytest.fixture
def bundles(pristine: Path, tmp_path: Path) -> Path:
    """A directory with `step_2` and `step_4`, to be spoilt."""
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def damage(bundle: Path, **options: Any) -> BundleDamaged:
    with pytest.raises(BundleDamaged) as refused:
        verify(bundle, **options)
    assert refused.value.bundle == bundle.name
    return refused.value


# what comes out -----------------------------------------------------------------------------


def test_a_verified_bundle_has_what_was_saved(bundles: Path) -> None:
    found = verify(bundles / "step_4")
    assert found.cut == make_cut(4)
    assert found.digest == cut_digest(make_cut(4))
    assert (found.step, found.info.step, found.manifest.step) == (4, 4, 4)
    assert found.config == {"grpo": {"seed": 0}}
    assert found.path == bundles / "step_4"
    assert found.policy_dir == bundles / "step_4" / "policy"
    assert found.data_plane_dir == bundles / "step_4" / "data_plane"
    assert repr(found) == f"<VerifiedBundle {found.path} {found.digest[:12]}>"


def test_verifying_changes_nothing(bundles: Path) -> None:
    before = {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in bundles.rglob("*")}
    verify(bundles / "step_4")
    assert newest_valid(bundles) is not None
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in bundles.rglob("*")}


def test_nobody_else_makes_a_verified_bundle(bundles: Path) -> None:
    found = verify(bundles / "step_4")
    parts = (found.path, found.manifest, found.cut, found.info, found.config)
    with pytest.raises(RestoreOrderError):
        VerifiedBundle(object(), *parts)
    with pytest.raises(RestoreOrderError):
        copy.copy(found)
    with pytest.raises(RestoreOrderError):
        pickle.dumps(found)


def test_a_path_may_be_relative(bundles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundles)
    assert verify(Path("step_4")).path == bundles / "step_4"
    monkeypatch.chdir(bundles / "step_4")
    assert verify(Path("../step_2")).path == bundles / "step_2"
    assert verify(Path()).path == bundles / "step_4"


@pytest.mark.parametrize("name", ["step_04", "tmp_step_4", "trash_step_4", "step_x", "copy"])
def test_only_a_bundles_name_is_read(bundles: Path, name: str) -> None:
    os.rename(bundles / "step_4", bundles / name)
    assert "named" in damage(bundles / name).reason


# choosing -----------------------------------------------------------------------------------


def test_no_bundle_at_all_is_no_error(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent") is None
    (tmp_path / "tmp_step_4").mkdir()
    (tmp_path / "step_5").touch()
    assert newest_valid(tmp_path) is None


def test_bundles_without_a_valid_one_are_an_error_that_lists_why(
    bundles: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (bundles / "step_2" / "config.yaml").unlink()
    (bundles / "step_4" / "policy" / "weights.bin").write_bytes(b"")
    with caplog.at_level(logging.WARNING), pytest.raises(NoValidBundle) as refused:
        newest_valid(bundles)
    assert [r.split(": ")[:2] for r in refused.value.reasons] == [
        ["step_4", "policy/weights.bin"],
        ["step_2", "config.yaml"],
    ]
    assert "refused: step_4: policy/weights.bin: has 0 bytes and had 23" in caplog.text


def test_what_was_refused_before_is_not_read_again(bundles: Path) -> None:
    reason = BundleDamaged("step_4", "data_plane", "did not load")
    heard: list[str] = []
    found = newest_valid(
        bundles, refused={"step_4": reason}, on_refused=lambda name, _: heard.append(name)
    )
    assert found is not None
    assert (found.step, heard) == (2, [])
    with pytest.raises(NoValidBundle, match="did not load"):
        newest_valid(bundles, refused={"step_4": reason, "step_2": reason})


def test_an_intact_bundle_that_contradicts_itself_stops_the_search(bundles: Path) -> None:
    shutil.rmtree(bundles / "step_2")
    os.rename(bundles / "step_4", bundles / "step_6")
    with pytest.raises(BundleInconsistent, match="step_6: step is 6 in its name and 4 in MANIFEST"):
        newest_valid(bundles)


def test_a_directory_that_can_not_be_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(RestoreError, match="can't be listed"):
        candidates(tmp_path / "checkpoints")


def test_one_moved_aside_counts_only_while_its_step_is_missing(bundles: Path) -> None:
    shutil.copytree(bundles / "step_4", bundles / "old_step_4")
    assert [path.name for path in candidates(bundles)] == ["step_4", "step_2"]
    shutil.rmtree(bundles / "step_4")
    assert [path.name for path in candidates(bundles)] == ["old_step_4", "step_2"]
    assert verify(bundles / "old_step_4").step == 4


# the manifest and its key ---------------------------------------------------------------------


def test_with_a_key_only_what_it_signed_is_read(bundles: Path) -> None:
    step_4 = bundles / "step_4"
    assert "not signed" in damage(step_4, key=b"secret").reason
    reseal(step_4, key=b"secret")
    assert verify(step_4, key=b"secret").step == 4
    assert verify(step_4).step == 4
    assert "signature" in damage(step_4, key=b"another").reason
    reseal(step_4, key=b"forged", cut_digest="0" * 64)
    refused = damage(step_4, key=b"secret")
    assert (refused.file, "signature" in refused.reason) == ("MANIFEST.json", True)
    with pytest.raises(NoValidBundle, match="SC_BUNDLE_KEY"):
        newest_valid(bundles, key=b"secret")


def test_every_bit_of_a_manifest_matters() -> None:
    sealed = manifest.seal_manifest(
        manifest.Manifest(
            step=4,
            weight_version=4,
            cut_digest="c",
            files={"policy/a": manifest.FileSeal(1, "d")},
        ),
        b"secret",
    )
    for place in range(len(sealed)):
        for bit in range(8):
            flipped = bytearray(sealed)
            flipped[place] ^= 1 << bit
            with pytest.raises(BundleDamaged):
                manifest.open_manifest(bytes(flipped), None, "step_4")


@pytest.mark.parametrize("cut", [0, 1, 40, -40, -1])
def test_a_manifest_cut_short_is_refused(bundles: Path, cut: int) -> None:
    file = bundles / "step_4" / "MANIFEST.json"
    file.write_bytes(file.read_bytes()[:cut])
    assert damage(bundles / "step_4").file == "MANIFEST.json"


def test_another_schema_is_refused_by_name_and_not_skipped(bundles: Path) -> None:
    reseal(bundles / "step_4", schema="bundle.v7")
    with pytest.raises(RestoreError, match=r"step_4 has schema bundle.v7 .* reads bundle.v1"):
        newest_valid(bundles)


@pytest.mark.parametrize(
    "name", ["../evil", "policy/../../evil", "/etc/hostname", "", ".", "policy//a", "a\0b"]
)
def test_a_manifest_that_points_outside_is_refused(bundles: Path, name: str) -> None:
    (bundles / "evil").write_bytes(b"evil")
    files = verify(bundles / "step_4").manifest.files
    seal = manifest.FileSeal(4, "4" * 64)
    reseal(bundles / "step_4", files={**files, name: seal})
    refused = damage(bundles / "step_4")
    assert refused.file == "MANIFEST.json"
    assert repr(name) in refused.reason


def test_a_manifest_that_leaves_out_a_file_is_refused(bundles: Path) -> None:
    bundle = bundles / "step_4"
    for name in ("training_info.json", "policy/weights.bin"):
        files = dict(verify(bundles / "step_2").manifest.files)
        del files[name]
        reseal(bundle, files=files)
        refused = damage(bundle)
        assert (refused.file, refused.reason) == (name, "not listed in MANIFEST.json")


@pytest.mark.parametrize("name", [n for n in WRITTEN if "/" not in n and n != "MANIFEST.json"])
def test_what_every_bundle_has_can_not_be_left_out(bundles: Path, name: str) -> None:
    (bundles / "step_4" / name).unlink()
    reseal(bundles / "step_4")
    assert str(damage(bundles / "step_4")) == f"step_4: {name}: missing"


# who may change it ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["step_4", "step_4/policy", "step_4/policy/tokenizer", "step_4/data_plane/metadata.json"],
)
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_to_is_refused(bundles: Path, name: str, mode: int) -> None:
    path = bundles / name
    path.chmod(path.stat().st_mode | mode)
    refused = damage(bundles / "step_4")
    assert refused.file == (name.partition("/")[2] + "/" * path.is_dir() if "/" in name else ".")
    assert f"chmod go-w {path}" in refused.reason


def test_so_is_what_lies_where_others_can_rename_it(bundles: Path) -> None:
    bundles.chmod(0o777)
    refused = damage(bundles / "step_4")
    assert refused.file == ".."
    assert f"chmod go-w {bundles}" in refused.reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(bundles: Path) -> None:
    os.chown(bundles / "step_4" / "policy" / "weights.bin", 12345, -1)
    assert damage(bundles / "step_4").file == "policy/weights.bin"


# links and other surprises ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WRITTEN, "policy", "data_plane", "policy/tokenizer"])
def test_a_link_is_refused_even_if_it_leads_to_the_same(bundles: Path, name: str) -> None:
    path = bundles / "step_4" / name
    os.rename(path, bundles / "moved")
    path.symlink_to(bundles / "moved")
    refused = damage(bundles / "step_4")
    assert (refused.file, refused.reason) == (name, "a link where only files may be")


def test_a_link_to_a_bundle_is_no_bundle(bundles: Path) -> None:
    (bundles / "step_6").symlink_to("step_4")
    assert damage(bundles / "step_6").file == "."
    found = newest_valid(bundles)
    assert found is not None
    assert found.path.name == "step_4"


@pytest.mark.parametrize(
    ("add", "file"),
    [
        (lambda path: (path / "extra").touch(), "extra"),
        (lambda path: (path / "policy" / ".hidden").touch(), "policy/.hidden"),
        (lambda path: os.mkfifo(path / "data_plane" / "pipe"), "data_plane/pipe"),
        (lambda path: os.makedirs(path / "/".join("d" * 40)), "/".join("d" * 33) + "/"),
        (lambda path: shutil.rmtree(path / "data_plane"), "data_plane"),
        (lambda path: shutil.rmtree(path / "policy"), "policy"),
    ],
)
def test_a_changed_tree_is_refused(bundles: Path, add: Callable[[Path], Any], file: str) -> None:
    add(bundles / "step_4")
    assert damage(bundles / "step_4").file == file


def test_too_many_files_are_refused(bundles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[VerifiedBundle.__module__]  # `sc_core.verify` is the function
    monkeypatch.setattr(module, "MAX_FILES", len(WRITTEN) - 2)
    assert "one of more than" in damage(bundles / "step_4").reason
    monkeypatch.setattr(module, "MAX_FILES", len(WRITTEN) - 1)
    assert verify(bundles / "step_4").step == 4


@pytest.mark.parametrize("name", [*WRITTEN, "step_4"])
def test_what_can_not_be_read_is_damaged_not_a_crash(name: str) -> None:
    """A disk that fails at one path: the bundle is refused in its name."""

    class Failing(MemoryDisk):
        broken = ""

        def _node(self, path: Path) -> Any:
            if self.broken and str(path).endswith(self.broken):
                raise OSError(errno.EIO, "Input/output error", str(path))
            return super()._node(path)

    disk = Failing()
    store = BundleStore(Path("/checkpoints"), disk=disk)
    store.open()
    save(store, 4)
    disk.broken = name
    refused = damage(Path("/checkpoints/step_4"), disk=disk)
    assert refused.file == ("." if name == "step_4" else name)
    assert "Input/output error" in refused.reason


# what is decoded -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["training_info.json", "config.yaml", "train_dataloader.msgpack", "MANIFEST.json"]
)
def test_a_file_too_large_to_decode_is_not_read(
    bundles: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(manifest.AT_MOST_BYTES, name, 100_000)  # type: ignore[misc]
    with open(bundles / "step_4" / name, "ab") as file:
        file.truncate(100_001)
    if name != "MANIFEST.json":
        reseal(bundles / "step_4")
    refused = damage(bundles / "step_4")
    assert (refused.file, "more than 100000 bytes" in refused.reason) == (name, True)


def put_cut(bundle: Path, cut: Any, **changes: Any) -> None:
    (bundle / "replay_buffer_metadata.msgpack").write_bytes(encode_cut(cut))
    reseal(bundle, cut_digest=cut_digest(cut), **changes)


def test_a_deeply_nested_payload_is_refused_before_anything_walks_it(bundles: Path) -> None:
    deep: Any = "payload"
    for _ in range(manifest.MAX_NESTING):
        deep = [deep]
    put_cut(bundles / "step_4", make_cut(4, payload=deep))
    assert verify(bundles / "step_4").cut.records[0].payload == deep
    put_cut(bundles / "step_4", make_cut(4, payload={"a": deep}))
    refused = damage(bundles / "step_4")
    assert refused.file == "replay_buffer_metadata.msgpack"
    assert "containers inside one another" in refused.reason


def test_deeply_nested_settings_are_refused(bundles: Path) -> None:
    config = bundles / "step_4" / "config.yaml"
    config.write_text('{"a":' + "[" * manifest.MAX_NESTING + "]" * manifest.MAX_NESTING + "}")
    reseal(bundles / "step_4")
    assert damage(bundles / "step_4").file == "config.yaml"


def test_a_deeply_nested_position_is_refused(bundles: Path) -> None:
    file = bundles / "step_4" / "train_dataloader.msgpack"
    deep = msgspec.msgpack.decode(b"\x91" * manifest.MAX_NESTING + b"\x90")
    file.write_bytes(
        msgspec.msgpack.encode({**msgspec.msgpack.decode(file.read_bytes()), "position": deep})
    )
    reseal(bundles / "step_4")
    assert damage(bundles / "step_4").file == file.name


# what contradicts itself -------------------------------------------------------------------------


def test_a_cut_of_another_digest_is_inconsistent(bundles: Path) -> None:
    reseal(bundles / "step_4", cut_digest="0" * 64)
    with pytest.raises(
        BundleInconsistent, match=f"digest is {'0' * 64} .* and {cut_digest(make_cut())}"
    ):
        verify(bundles / "step_4")


@pytest.mark.parametrize("field", ["step", "weight_version"])
def test_a_cut_of_another_step_or_version_is_inconsistent(bundles: Path, field: str) -> None:
    put_cut(bundles / "step_4", msgspec.structs.replace(make_cut(4), **{field: 5}))
    with pytest.raises(
        BundleInconsistent, match=rf"{field} is 4 in MANIFEST.json and 5 in replay_buffer"
    ):
        verify(bundles / "step_4")


def test_a_cut_that_contradicts_itself_is_inconsistent(bundles: Path) -> None:
    put_cut(bundles / "step_4", msgspec.structs.replace(make_cut(4), groups=()))
    with pytest.raises(BundleInconsistent, match=r"step_4: ledger: prompt 10 is committed"):
        verify(bundles / "step_4")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 5),
        ("weight_version", 5),
        ("group_size", 3),
        ("prompts_per_step", 3),
        ("incarnation", "another"),
        ("event_seq", 41),
        ("counters", {"trained": 9}),
    ],
)
def test_training_info_that_says_otherwise_is_inconsistent(
    bundles: Path, field: str, value: Any
) -> None:
    file = bundles / "step_4" / "training_info.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    reseal(bundles / "step_4")
    with pytest.raises(BundleInconsistent, match=rf"{field} is .* in training_info.json and "):
        verify(bundles / "step_4")


@pytest.mark.parametrize(
    ("field", "value"),
    [("position", {"epoch": 1}), ("fingerprint", "x"), ("next_ordinal", 1), ("exhausted", True)],
)
def test_a_position_that_says_otherwise_is_inconsistent(
    bundles: Path, field: str, value: Any
) -> None:
    file = bundles / "step_4" / "train_dataloader.msgpack"
    file.write_bytes(
        msgspec.msgpack.encode({**msgspec.msgpack.decode(file.read_bytes()), field: value})
    )
    reseal(bundles / "step_4")
    with pytest.raises(BundleInconsistent, match=rf"{field} is .* in train_dataloader.msgpack"):
        verify(bundles / "step_4")


def test_a_position_that_is_not_a_number_agrees_with_itself() -> None:
    disk = MemoryDisk()
    store = BundleStore(Path("/checkpoints"), disk=disk)
    store.open()
    staged = store.stage(4)
    disk.make_dir(staged.data_plane_dir)
    disk.write(staged.policy_dir / "weights", b"4")
    cut = msgspec.structs.replace(make_cut(4), position={"loss": float("nan"), 3: b"\xff"})
    store.publish(staged, cut=cut, digest=cut_digest(cut), config={}, metrics={})
    assert verify(Path("/checkpoints/step_4"), disk).cut.position[3] == b"\xff"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("replay_buffer_metadata.msgpack", b"cut.v1", b"cut.v0"),
        ("replay_buffer_metadata.msgpack", b"cut.v1", b"cut.v2"),
        ("train_dataloader.msgpack", b"position.v1", b"position.v0"),
        ("training_info.json", b"training_info.v1", b"training_info.v3"),
    ],
)
def test_a_file_of_another_schema_is_refused_by_name_and_not_skipped(
    bundles: Path, name: str, old: bytes, new: bytes
) -> None:
    file = bundles / "step_4" / name
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    reseal(bundles / "step_4")
    told = rf"step_4: {name} has schema {new.decode()} and this version reads {old.decode()}; res"
    with pytest.raises(RestoreError, match=told) as refused:
        newest_valid(bundles)
    assert not isinstance(refused.value, BundleDamaged)


def test_a_directory_with_one_bundle_that_is_damaged_counts_it_as_one() -> None:
    assert "d holds 1 checkpoint and none is valid: a. Move" in str(NoValidBundle("d", ["a"]))
    assert "d holds 2 checkpoints and none" in str(NoValidBundle("d", ["a", "b"]))
