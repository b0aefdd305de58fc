"""Who gets which bundle of a placement group, and whether its nodes see the run directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from sc_core import ConfigError
from sc_ray import shared_files
from sc_ray.placement import Process, deal
from sc_ray.settings import load_config
from sc_ray.shared_files import Use, check_files
from sc_ray.trainer.peers import interface_of

# dealing -------------------------------------------------------------------------------


def processes(
    trainers: int = 0, engines: int = 0, units: int = 0, gpus: float = 0
) -> list[Process]:
    return [
        *(Process(name=f"t{rank}", kind="trainer", gpus=gpus) for rank in range(1, trainers + 1)),
        *(Process(name=f"e{rank}", kind="engine", gpus=gpus) for rank in range(engines)),
        *(Process(name=f"u{rank}", kind="unit") for rank in range(units)),
    ]


def dealt(wanted: list[Process], nodes: str) -> dict[str, str]:
    """The node of each, by name. `nodes`: those of the bundles, of which the first is taken."""
    bundles = [{"CPU": 3.0}, *(process.resources for process in wanted)]
    by_index = dict(enumerate(nodes))
    indexes = deal(wanted, bundles, by_index, there=[("trainer", nodes[0])])
    assert sorted(indexes.values()) == list(range(1, len(bundles)))
    for process in wanted:
        assert bundles[indexes[process.name]] == process.resources
    return {name: by_index[index] for name, index in indexes.items()}


def test_each_kind_is_spread_whatever_the_order_of_the_bundles() -> None:
    wanted = processes(trainers=1, engines=2, units=2)
    for nodes in ("hfffhh", "hfhfhf", "hhhfff"):
        where = dealt(wanted, nodes)
        assert where["t1"] == "f", "the first trainer worker is at home"
        assert {where["e0"], where["e1"]} == {where["u0"], where["u1"]} == {"h", "f"}


def test_each_kind_is_spread_also_where_nodes_have_different_room() -> None:
    where = dealt(processes(trainers=0, engines=2, units=2), "hhhhf")
    assert {where["e0"], where["e1"]} == {"h", "f"}
    where = dealt(processes(trainers=0, engines=1, units=2), "hfhh")
    assert {where["u0"], where["u1"]} == {"h", "f"}, "the engine is where most is free"
    assert dealt(processes(trainers=1, engines=0, units=1), "hhf")["t1"] == "f"


def test_bundles_with_gpus_are_for_those_that_asked_for_them() -> None:
    where = dealt(processes(trainers=1, engines=2, units=3, gpus=1), "hhhgfff")
    assert (where["t1"], {where["e0"], where["e1"]}) == ("g", {"h"})


def test_one_node_takes_all() -> None:
    assert set(dealt(processes(trainers=2, engines=1, units=2), "hhhhhh").values()) == {"h"}


@pytest.mark.parametrize(
    ("settings", "here"),
    [
        ((), 1 + 1 + 2 + 3 + 2),
        (("cluster.spread_generation=true",), 1 + 1 + 2 + 2),
        (("cluster.placement=spread",), 3),
        (("cluster.placement=pack", "generation.max_workers=9"), 3),
    ],
)
def test_what_the_driver_s_node_must_have_room_for(settings: tuple[str, ...], here: int) -> None:
    sizes = ("policy.workers=2", "generation.workers=3", "cluster.storage_units=2")
    config = load_config("demo", [*sizes, *settings])
    assert (config.cpus_needed_here, config.cpus_needed) == (here, 9)


def test_fewer_engines_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_workers is 1, less than the 2 of generation.work"):
        load_config("demo", ["generation.workers=2", "generation.max_workers=1"])


# shared files --------------------------------------------------------------------------


@pytest.fixture
def node(local_ray: None) -> str:
    found: str = ray.get_runtime_context().get_node_id()
    return found


def check(run_dir: Path, node: str, *, writes: bool = True, model: str | None = None) -> None:
    use = Use(processes=["unit 0", "trainer-1"], shares=True, writes=writes)
    check_files(run_dir, {node: use}, model=model, deadline_s=60)


def test_a_directory_that_a_node_shares_is_as_before(node: str, tmp_path: Path) -> None:
    check(tmp_path, node, model=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_sees_another_directory_is_named(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, here = tmp_path / "its own", tmp_path / "run"
    other.mkdir()
    here.mkdir()
    look: Callable[..., str] = shared_files._look

    def elsewhere(path: str | None) -> str | None:
        return path and os.path.join(str(other), os.path.basename(path))

    def sees_nothing(probe: str, answer: str | None, model: str | None) -> str:
        return look(elsewhere(probe), None, model)

    def writes_elsewhere(probe: str, answer: str | None, model: str | None) -> str:
        return look(probe, elsewhere(answer), model)

    def can_not_write(probe: str, answer: str | None, model: str | None) -> str:
        return look(probe, answer and os.path.join(str(other), "missing", "file"), model)

    def can_not_look(probe: str, answer: str | None, model: str | None) -> str:
        raise ModuleNotFoundError("No module named 'sc_ray'")

    for at_fault, words in (
        (sees_nothing, "does not see what is in "),
        (writes_elsewhere, f"writes to a {here} of its own; every node needs the run directory"),
        (can_not_write, "can't write to .*: No such file or directory"),
        (can_not_look, "can't look for them: .*No module named 'sc_ray'"),
    ):
        monkeypatch.setattr(shared_files, "_look", at_fault)
        who = r"^node \d+\.\d+\.\d+\.\d+, which is to have unit 0, trainer-1, "
        with pytest.raises(ConfigError, match=who + words):
            check(here, node)
        assert list(here.iterdir()) == []
    monkeypatch.setattr(shared_files, "_look", writes_elsewhere)
    check(here, node, writes=False)
    with pytest.raises(ConfigError, match="has no directory .*/its own/model; "):
        check(here, node, writes=False, model=str(other / "model"))


# networks ------------------------------------------------------------------------------


def test_the_network_of_an_address_is_found(local_ray: None) -> None:
    assert (interface_of("127.0.0.1") or "").startswith("lo")
    assert interface_of(ray.util.get_node_ip_address())
    assert interface_of("203.0.113.7") is None
