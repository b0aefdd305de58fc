"""From a directory of bundles to a store that may be used: the only way there is.

    newest valid bundle -> untouched store -> load -> same rows, same cut -> ReadyStore

A `ReadyStore` can't be made in any other way, is used once, and is what a data plane, and with
it a controller, is opened from. The wrong order does not type-check; run anyway, it raises
`RestoreOrderError`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from sc_core.bundle import BundleStore
from sc_core.calls import settle
from sc_core.config import ControllerConfig, DeadlinesConfig
from sc_core.errors import (
    BundleDamaged,
    BundleInconsistent,
    ConfigChanged,
    InventoryMismatch,
    RestoreError,
    RestoreOrderError,
    checkpoints,
)
from sc_core.manifest import parse_name
from sc_core.ports import BootstrapDataPlane, Runner
from sc_core.records import Cut, SampleId
from sc_core.returned import check_mapping, check_rows
from sc_core.verify import Refused, VerifiedBundle, candidates, newest_valid, verify
from sc_core.window import check_inventory, snapshot_metadata

logger = logging.getLogger(__name__)

_PROVEN = object()
_DEADLINES = DeadlinesConfig()


class ReadyStore:
    """Proof that the store holds exactly a bundle's rows, or has never been touched.

    Made by `restore`, or by `SentStore.receive` from one that was. Used once.
    """

    def __init__(self, proof: object, bundle: VerifiedBundle | None) -> None:
        if proof is not _PROVEN:
            raise RestoreOrderError("a ReadyStore comes from sc_core.restore(), after its checks")
        self.bundle = bundle  #: what the store was filled from; None: a fresh start
        self._used = False

    def use(self) -> None:
        """Spend the token: a controller does, before it opens its data plane.

        Raises:
            RestoreOrderError: it was spent before.
        """
        if self._used:
            raise RestoreOrderError("this ReadyStore was used; restore again for another run")
        self._used = True

    def send(self) -> SentStore:
        """Spend the token here, so that another process can have it."""
        self.use()
        if self.bundle is None:
            return SentStore(None, None)
        return SentStore(str(self.bundle.path), self.bundle.digest)

    def __reduce__(self) -> NoReturn:
        raise RestoreOrderError("a ReadyStore proves nothing elsewhere: send() it, then receive()")


class SentStore(msgspec.Struct, frozen=True):
    """A `ReadyStore` on its way to the process that runs the controller."""

    path: str | None  #: of the bundle that the store was filled from
    digest: str | None  #: of its cut

    async def receive(
        self, store: BundleStore, *, runner: Runner, deadlines: DeadlinesConfig = _DEADLINES
    ) -> ReadyStore:
        """The token again, once the bundle was verified here too.

        Raises:
            BundleDamaged, BundleInconsistent: it changed on the way.
            CallTimeout: it could not be read within `deadlines.disk_s`.
        """
        if self.path is None:
            return ReadyStore(_PROVEN, None)
        path = Path(self.path)
        bundle = await settle(
            f"reading {path}",
            deadlines.disk_s,
            lambda: runner(lambda: verify(path, store.disk, key=store.key)),
        )
        if bundle.digest != self.digest:
            raise BundleInconsistent(
                f"{bundle.path.name}: its cut had digest {self.digest} when the store was filled"
                f" and has {bundle.digest} now"
            )
        return ReadyStore(_PROVEN, bundle)


async def restore(
    store: BundleStore,
    bootstrap: BootstrapDataPlane,
    config: ControllerConfig,
    *,
    runner: Runner,
    resume: Literal["auto", "never"] | Path = "auto",
    source_fingerprint: str | None = None,
) -> ReadyStore:
    """Fill the store from the newest bundle that can be used; none at all is a fresh start.

    May be killed at any await and run again: it writes to no bundle. A damaged bundle is
    skipped with a warning that says why, as is one whose snapshot does not load; the store is
    discarded before the next is tried.

    Raises:
        RestoreOrderError: the store was touched before.
        NoValidBundle: bundles exist and none can be used.
        BundleInconsistent: an intact bundle contradicts itself; nothing is guessed.
        ConfigChanged: the settings can't go on from the bundle; both numbers are named.
        CallTimeout: the disk or the store did not answer in time.
    """
    deadlines = config.async_rl.deadlines
    if not await settle("store.is_untouched", deadlines.data_plane_s, bootstrap.is_untouched):
        raise RestoreOrderError(
            "the data plane's store was touched before the restore; restore first, or discard it"
        )
    refused: dict[str, RestoreError] = {}

    def on_refused(name: str, reason: RestoreError) -> None:
        logger.warning("not resuming from %s: %s", name, reason)
        refused[name] = reason

    def choose() -> VerifiedBundle | None:
        return choose_bundle(store, resume, on_refused=on_refused, refused=dict(refused))

    while True:
        bundle = await settle(
            f"reading the bundles in {store.directory}",
            deadlines.disk_s,
            lambda: runner(choose),
        )
        if bundle is None:
            return ReadyStore(_PROVEN, None)
        check_config(bundle.cut, config, source_fingerprint)
        try:
            await _fill(bundle, bootstrap, deadlines.data_plane_s, deadlines.snapshot_s)
        except (BundleInconsistent, ConfigChanged, InventoryMismatch):
            await settle("store.discard", deadlines.snapshot_s, bootstrap.discard)
            raise
        except Exception as exc:
            failure = BundleDamaged(bundle.path.name, "data_plane", f"{type(exc).__name__}: {exc}")
            logger.warning("not resuming from %s", failure)
            refused[bundle.path.name] = failure
            await settle("store.discard", deadlines.snapshot_s, bootstrap.discard)
            continue
        return ReadyStore(_PROVEN, bundle)


def check_resume(store: BundleStore, resume: Literal["auto", "never"] | Path) -> None:
    """Refuse what needs no look into a bundle; `restore` does so too, once the store is there.

    Raises:
        ConfigChanged: `never`, and there are bundles; or a path that names none.
    """
    present = candidates(store.directory, store.disk) if resume == "never" else ()
    if present:
        raise ConfigChanged(
            f"{store.directory} holds {checkpoints(len(present))}: resume from there, or choose"
            " another directory to start afresh"
        )
    if isinstance(resume, Path) and parse_name(resume.name) is None:
        raise ConfigChanged(
            f"{resume} is no checkpoint: name one of the step_N in {store.directory}"
        )


def choose_bundle(
    store: BundleStore,
    resume: Literal["auto", "never"] | Path,
    *,
    on_refused: Refused,
    refused: Mapping[str, RestoreError] = {},
) -> VerifiedBundle | None:
    """The bundle that `restore` would go on from: the newest that verifies, or the one named.

    `on_refused` hears of each damaged one, and why. Those in `refused` are passed over.

    Raises:
        NoValidBundle, BundleDamaged, BundleInconsistent, ConfigChanged: as `restore`.
    """
    check_resume(store, resume)
    if resume == "never":
        return None
    if isinstance(resume, Path):
        if resume.name in refused:
            raise refused[resume.name]
        bundle = verify(resume, store.disk, key=store.key)
        if bundle.path.parent != store.directory:
            raise ConfigChanged(
                f"{bundle.path} is not in {store.directory}: to go on from it elsewhere, copy its"
                " whole run directory, so that its event log comes along"
            )
        names = [path.name for path in candidates(store.directory, store.disk)]
        newer = names[: names.index(bundle.path.name)]
        if newer:  # the next resume would go on from there, in a history that never was
            raise ConfigChanged(
                f"{store.directory} also holds {', '.join(newer)}: move them away to go back to"
                f" {bundle.path.name}"
            )
        return bundle

    return newest_valid(
        store.directory, store.disk, key=store.key, on_refused=on_refused, refused=refused
    )


async def _fill(
    bundle: VerifiedBundle, bootstrap: BootstrapDataPlane, call_s: float, load_s: float
) -> None:
    call = "store.load_checkpoint"
    metadata = check_mapping(
        await settle(call, load_s, lambda: bootstrap.load_checkpoint(bundle.data_plane_dir)),
        call,
        "the metadata saved with the rows",
    )
    call = "store.list_sample_ids"
    listed = check_rows(await settle(call, call_s, bootstrap.list_sample_ids), call)
    check_store(bundle, metadata, listed)


def check_store(
    bundle: VerifiedBundle, metadata: Mapping[str, Any], listed: frozenset[SampleId]
) -> None:
    """Compare what a store was filled with, its metadata and rows, with the bundle's cut.

    Raises:
        BundleInconsistent: digest, step, version or a count differs; both values are named.
        InventoryMismatch: the rows are not those of the cut.
    """
    for name, value in snapshot_metadata(bundle.cut, bundle.digest).items():
        if metadata.get(name) != value:
            raise BundleInconsistent(
                f"{bundle.path.name}: {name} is {value} in the cut and {metadata.get(name)} in"
                " data_plane"
            )
    check_inventory(bundle.cut, listed)


def keeps_siblings(config: ControllerConfig) -> bool:
    """Whether a resume goes on with the finished siblings of groups that are not whole."""
    granularity = config.rollout_recovery.default_granularity
    return granularity == "sibling" and config.checkpointing.load_replay_buffer


def check_config(cut: Cut, config: ControllerConfig, source_fingerprint: str | None) -> None:
    """Refuse settings that can't go on from `cut`.

    Raises:
        ConfigChanged: the group size or the prompt source differs; both values are named.
    """
    group_size = config.grpo.num_generations_per_prompt
    if cut.group_size != group_size:
        raise ConfigChanged(
            f"the checkpoint's groups have {cut.group_size} siblings and"
            f" grpo.num_generations_per_prompt is {group_size}: a run can't change its group size"
        )
    changed = source_fingerprint is not None and cut.source_fingerprint != source_fingerprint
    if changed and not config.checkpointing.allow_changed_source:
        raise ConfigChanged(
            f"the checkpoint's prompts have fingerprint {cut.source_fingerprint or '(none)'} and"
            f" the prompts given now {source_fingerprint}: positions would mean other prompts."
            " Set checkpointing.allow_changed_source to go on nevertheless"
        )
