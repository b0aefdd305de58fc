"""The parts of a trainer that need no second process."""

from __future__ import annotations

import itertools
import math
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from test_policy import SMALL, made_up_rows, policy, train

from sc_core import Batch, ConfigError, Group, ScError
from sc_core.records import group_id, sample_ids
from sc_ray.trainer.config import SchedulerConfig
from sc_ray.trainer.microbatch import microbatches
from sc_ray.trainer.peers import Peers, Rendezvous, interface_of
from sc_ray.trainer.schedule import schedule
from sc_ray.trainer.seat import LOOPBACK
from sc_ray.trainer.shares import balanced, shares_of
from sc_ray.trainer.snapshot import SavedPolicy
from sc_ray.trainer.totals import Totals

# shares --------------------------------------------------------------------------------


def group(ordinal: int, rows: int, tokens: int = 0, masked: tuple[int, ...] = ()) -> Group:
    return Group(
        group_id=group_id(ordinal, 0),
        ordinal=ordinal,
        sample_ids=sample_ids(group_id(ordinal, 0), rows),
        start_weight_version=0,
        end_weight_version=0,
        commit_seq=ordinal,
        tokens=tokens,
        masked=masked,
    )


def batch(*groups: Group) -> Batch:
    return Batch(step=1, weight_version=0, groups=groups)


def best(tokens: list[int], workers: int) -> int:
    """Of all partitions, the one whose fullest worker has least."""
    ways = itertools.product(range(workers), repeat=len(tokens))
    return min(
        max(sum(t for t, w in zip(tokens, way, strict=True) if w == worker) for worker in
            range(workers))
        for way in ways
    )  # fmt: skip


def test_no_worker_gets_more_than_a_third_over_what_is_best() -> None:
    own = random.Random(1)
    for workers in (2, 3):
        for _ in range(20):
            tokens = [own.choice([1, 2, 3, 50, 100]) for _ in range(own.randint(1, 6))]
            dealt = balanced(tokens, workers)
            assert sorted(itertools.chain(*dealt)) == list(range(len(tokens)))
            assert all(numbers == sorted(numbers) for numbers in dealt)
            fullest = max(sum(tokens[at] for at in numbers) for numbers in dealt)
            assert fullest <= best(tokens, workers) * 4 / 3


def test_a_long_group_is_split_where_whole_groups_would_not_balance() -> None:
    uneven = batch(group(0, 4, tokens=400), group(1, 4, tokens=40), group(2, 4, tokens=40))
    first, second = shares_of(uneven, 2, trained=False)
    assert first == ("0.0_g0", "0.0_g2", "1.0_g0", "1.0_g2", "2.0_g0", "2.0_g2")
    assert set(first) | set(second) == set(uneven.sample_ids) and len(second) == 6


def test_masked_rows_are_dealt_only_where_all_rows_are_wanted() -> None:
    some = batch(group(0, 3, tokens=30, masked=(0, 1)), group(1, 2, tokens=20, masked=(0, 1)))
    assert shares_of(some, 2, trained=True) == [("0.0_g2",), ()]
    assert sorted(sum(shares_of(some, 2, trained=False), ())) == sorted(some.sample_ids)
    assert shares_of(batch(group(0, 2, masked=(0, 1))), 3, trained=True) == [(), (), ()]


def test_one_worker_takes_all_in_the_batch_s_order_and_few_rows_leave_some_without() -> None:
    both = batch(group(0, 2, tokens=2), group(1, 2, tokens=90))
    assert shares_of(both, 1, trained=True) == [both.sample_ids]
    assert shares_of(batch(group(0, 2)), 4, trained=True) == [("0.0_g0",), ("0.0_g1",), (), ()]


def test_rows_without_a_count_are_dealt_by_number() -> None:
    assert [len(share) for share in shares_of(batch(group(0, 7)), 3, trained=True)] == [3, 2, 2]


# microbatches and totals ---------------------------------------------------------------


def test_empty_microbatches_come_after_those_with_rows_until_there_are_enough() -> None:
    def sizes(rows: int, at_least: int) -> list[int]:
        made = microbatches(made_up_rows(rows), 4, 0, torch.device("cpu"), at_least=at_least)
        return [len(each.rows) for each in made]

    assert sizes(6, 3) == [4, 2, 0]
    assert sizes(6, 1) == [4, 2]
    assert sizes(0, 2) == [0, 0]
    assert sizes(0, 0) == []


class Another:
    """A second worker that gave these numbers."""

    def __init__(self, *given: float) -> None:
        self._given = torch.tensor(given, dtype=torch.float64)

    def sum(self, tensor: torch.Tensor) -> None:
        tensor += self._given.masked_fill(torch.tensor([False, True]), 0.0)

    def max(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.maximum(tensor, self._given))


def test_fields_named_max_are_maxima_and_all_others_sums() -> None:
    totals, chunk = Totals(["tokens", "max_ratio"]), Totals(["tokens", "max_ratio"])
    assert totals.by_name() == {"tokens": 0.0, "max_ratio": 0.0}
    for tokens, ratio in ((3, 5.0), (4, 3.0)):
        chunk.add([torch.tensor(tokens), torch.tensor(ratio, requires_grad=True)])
    totals.add_all(chunk)
    assert totals.by_name() == {"tokens": 7.0, "max_ratio": 5.0}
    with_others: Any = Another(10, 4)
    totals.reduce(with_others)
    assert totals.by_name() == {"tokens": 17.0, "max_ratio": 5.0}
    with_others = Another(0, 7)
    totals.reduce(with_others)
    assert totals.by_name() == {"tokens": 17.0, "max_ratio": 7.0}


# the learning rate ---------------------------------------------------------------------


def rates(config: SchedulerConfig, steps: int) -> list[float]:
    return [config.over(steps).factor(step) for step in range(steps)]


def test_the_rate_rises_evenly_then_goes_down_to_its_lowest() -> None:
    near = pytest.approx
    assert rates(SchedulerConfig(), 3) == [1, 1, 1]
    assert rates(SchedulerConfig(warmup_steps=3), 5) == near([0.25, 0.5, 0.75, 1, 1])
    linear = SchedulerConfig(name="linear", warmup_steps=1, decay_steps=5, min_lr_ratio=0.2)
    assert rates(linear, 8) == near([0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = SchedulerConfig(name="cosine", min_lr_ratio=0.1)
    assert rates(cosine, 4) == near(
        [0.1 + 0.9 * (1 + math.cos(math.pi * gone / 4)) / 2 for gone in range(4)]
    )


def test_a_scheduler_begun_in_the_middle_has_the_rate_of_one_that_went_there() -> None:
    config = SchedulerConfig(name="cosine", warmup_steps=2, decay_steps=9)
    weight = torch.nn.Parameter(torch.zeros(1))
    walked, begun = (torch.optim.SGD([weight], lr=0.3) for _ in range(2))
    going = schedule(walked, config)
    for steps in range(7):
        schedule(begun, config, steps=steps)
        assert begun.param_groups[0]["lr"] == walked.param_groups[0]["lr"]
        walked.step()
        going.step()


@pytest.mark.parametrize(
    "wrong",
    [{"warmup_steps": -1}, {"min_lr_ratio": 1.1}, {"warmup_steps": 5, "decay_steps": 5}],
)
def test_a_schedule_that_can_not_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SchedulerConfig(**wrong)


def test_the_rate_of_each_step_is_told_saved_and_left_alone_by_what_trains_nothing(
    tmp_path: Path,
) -> None:
    config = SchedulerConfig(name="linear", decay_steps=4)
    trained, resumed = policy(scheduler=config), policy(scheduler=config)
    assert train(trained, made_up_rows())["lr"] == 5e-4
    trained.begin_step()
    trained.accumulate(made_up_rows())
    trained.abandon_step()
    trained.begin_step()
    assert trained.finish_step()["lr"] == pytest.approx(5e-4 * 3 / 4)  # and the rate stays
    trained.save(tmp_path)
    resumed.load(tmp_path)
    for each in (trained, resumed):
        assert train(each, made_up_rows())["lr"] == pytest.approx(5e-4 * 3 / 4)
        assert train(each, made_up_rows())["lr"] == pytest.approx(5e-4 * 2 / 4)
    assert SavedPolicy.read(tmp_path).scheduler_steps == 1


def test_a_save_from_before_there_was_a_scheduler_goes_on_by_its_steps(tmp_path: Path) -> None:
    trained = policy()
    for _ in range(2):
        train(trained, made_up_rows())
    trained.save(tmp_path)
    (tmp_path / "optimizer.json").write_text('{"type":"adamw.v1","steps":2}')
    resumed = policy(scheduler=SchedulerConfig(name="linear", decay_steps=4))
    resumed.load(tmp_path)
    assert train(resumed, made_up_rows())["lr"] == pytest.approx(5e-4 * 2 / 4)


# the reference -------------------------------------------------------------------------


def test_the_reference_stays_what_the_policy_was_at_first_also_after_a_load(
    tmp_path: Path,
) -> None:
    rows = made_up_rows()
    trained, fresh = policy(reference=True), policy()
    at_first = fresh.logprobs(rows)
    train(trained, rows)
    trained.save(tmp_path)
    resumed = policy(reference=True)
    resumed.load(tmp_path)
    for each in (trained, resumed):
        found = each.reference_logprobs(rows)
        assert all(torch.equal(*pair) for pair in zip(found, at_first, strict=True))
        assert not torch.equal(each.logprobs(rows)[0], at_first[0])
    with pytest.raises(ScError, match="without a reference"):
        fresh.reference_logprobs(rows)


# meeting -------------------------------------------------------------------------------


def test_a_worker_that_does_not_come_up_is_named() -> None:
    rendezvous = Rendezvous(3, start_s=0.3)
    assert rendezvous.missing() == ["trainer-0", "trainer-1", "trainer-2"]
    with pytest.raises(ScError, match=r"trainer-1 waited 0\.3 s for trainer-0, trainer-2"):
        Peers(rendezvous.seats[1])
    assert rendezvous.missing() == ["trainer-0", "trainer-2"]
    rendezvous.close()


def test_workers_of_several_nodes_meet_on_a_network_and_not_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for host in (LOOPBACK, ray.util.get_node_ip_address()):
        rendezvous = Rendezvous(1, host=host, start_s=30)
        (seat,) = rendezvous.seats
        socket.create_connection((host, seat.port), timeout=10).close()
        if host != LOOPBACK:  # a machine without a network has nothing else
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((LOOPBACK, seat.port), timeout=10)
        peers = Peers(seat)
        assert os.environ.pop("GLOO_SOCKET_IFNAME") == interface_of(host)
        peers.close()
        rendezvous.close()


# a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_step(tmp_path: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        trained = policy(model=SMALL, device=device)
        metrics = train(trained, made_up_rows())
        trained.save(tmp_path / device)
        found.append((metrics, SavedPolicy.read(tmp_path / device).weights))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3)
    for name, weight in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], weight, atol=1e-4, rtol=1e-3, msg=name)
