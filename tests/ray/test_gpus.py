"""Who gets GPUs, and what is refused before anybody would wait for one."""

from __future__ import annotations

from typing import Any

import pytest

from sc_core.errors import ConfigError
from sc_ray.actor_args import build_weight_sync
from sc_ray.broadcast import VllmTransport
from sc_ray.gpus import share_gpus, trainer_device
from sc_ray.settings import TrainConfig, load_config
from sc_ray.weight_transport import FileTransport

VLLM = ("generation.engine=vllm", "generation.workers=2")
NCCL = (*VLLM, "generation.weight_transfer=nccl", "generation.gpus=1")


def config(*overrides: str) -> TrainConfig:
    return load_config("demo", overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["generation.weight_transfer=nccl", "generation.gpus=1"], "generation.engine is torch"),
        ([*VLLM, "generation.weight_transfer=nccl"], "generation.gpus is 0; it must be at least 1"),
        ([*NCCL, "generation.gpus=0.5"], "generation.gpus is 0.5; it must be at least 1"),
        ([*NCCL, "policy.device=cpu"], "policy.device is cpu"),
        (["generation.gpus=1.5"], "generation.gpus is 1.5; Ray keeps whole GPUs for an engine, or"),
        (["generation.gpus=0.00001"], "a share of one, 0.0001 at least"),
        (["generation.gpus=.inf"], "generation.gpus is inf; Ray keeps whole GPUs"),
        (["generation.gpus=.nan"], "generation.gpus is nan; it must be at least 0"),
        (["generation.weight_transfer=ipc"], "generation.weight_transfer"),
        (
            [*NCCL, "generation.vllm.engine_args={tensor_parallel_size: 2}"],
            "generation.gpus is 1, and generation.vllm.engine_args spread an engine over 2",
        ),
    ],
)
def test_settings_that_can_not_be_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(*overrides)


@pytest.mark.parametrize(
    ("overrides", "there", "usable", "device"),
    [
        ((), 0, False, "cpu"),
        ((), 1, True, "cuda"),
        ((), 1, False, "cpu"),
        (("policy.workers=2",), 1, True, "cpu"),
        (("policy.device=cpu",), 1, True, "cpu"),
        (("policy.device=cuda",), 1, True, "cuda"),
        (VLLM, 0, False, "cpu"),
        (VLLM, 4, False, "cpu"),
        ((*VLLM, "generation.gpus=1"), 2, True, "cpu"),
        ((*VLLM, "generation.gpus=1"), 3, True, "cuda"),
        (NCCL, 3, True, "cuda"),
        (("generation.workers=3", "generation.gpus=0.3333"), 2, True, "cuda"),
        (("generation.workers=10", "generation.gpus=0.1"), 2, True, "cuda"),
        (("generation.workers=3", "generation.gpus=0.5"), 2, True, "cpu"),
        (
            (*NCCL, "generation.gpus=2", "generation.vllm.engine_args={tensor_parallel_size: 2}"),
            5,
            True,
            "cuda",
        ),
    ],
)
def test_the_trainer_gets_what_engines_leave(
    overrides: tuple[str, ...], there: float, usable: bool, device: str
) -> None:
    assert share_gpus(config(*overrides), there, usable=usable) == device


@pytest.mark.parametrize(
    ("overrides", "there", "usable", "says"),
    [
        (("policy.device=cuda",), 0, False, "torch finds no GPU that it can use; Ray has 0"),
        (("policy.device=cuda",), 2, False, "torch finds no GPU that it can use; Ray has 2"),
        (("policy.device=cuda", "policy.workers=2"), 1, True, "2 trainer workers need as many"),
        (("policy.device=cuda", "generation.gpus=1"), 1, True, "1 of them are for generation"),
        ((*VLLM, "generation.gpus=1"), 1, True, "2 generation workers need 2 GPUs of Ray, which"),
        (
            ("generation.workers=3", "generation.gpus=0.6"),
            2,
            True,
            "gpus is 0.6: 3 generation workers need 3 GPUs of Ray, which has 2",
        ),
        (
            ("policy.device=cuda", "generation.workers=5", "generation.gpus=0.4"),
            3,
            True,
            "1 trainer workers need as many GPUs of Ray, which has 3, and 3 of them are for",
        ),
        (VLLM, 1, True, "generation.gpus is 0, and vLLM would take a GPU"),
        (NCCL, 2, True, "1 trainer workers need a GPU each, beside 2 for generation; Ray has 2$"),
        (NCCL, 3, False, "Ray has 3, and torch can use none"),
    ],
)
def test_who_would_wait_for_ever_is_refused(
    overrides: tuple[str, ...], there: float, usable: bool, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        share_gpus(config(*overrides), there, usable=usable)


def test_the_gpus_are_those_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0})
    assert trainer_device(config()) == "cpu"
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    for usable, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda usable=usable: usable)
        assert trainer_device(config()) == device


def test_weights_go_the_way_that_is_named() -> None:
    engines: Any = [object()]
    trainer: Any = None
    for settings, kind in ((config(), FileTransport), (config(*NCCL), VllmTransport)):
        with build_weight_sync(settings, trainer, engines, "test-of-way") as sync:
            assert type(sync._transport) is kind
            assert sync._engine_s == settings.async_rl.deadlines.weight_sync_s / 2
