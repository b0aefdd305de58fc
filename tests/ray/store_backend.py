"""A backend of vLLM's weight transfer for machines without a GPU: tensors go through a store.

It takes the place of NCCL, and of nothing else: vLLM's own calls, layer-wise reload and factories
are used as they are. The engine's process imports this module since `Extension` is named to it.
"""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

PATIENCE = datetime.timedelta(seconds=120)


class Extension:
    """Given to vLLM as `worker_extension_cls`."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class StoreEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    store: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        assert self.store is None, "the old connection is released first"
        self.rank = init_info.rank_offset + self.parallel_config.rank
        self.store = TCPStore(
            init_info.master_address, init_info.master_port, is_master=False, timeout=PATIENCE
        )
        self.store.set(f"here/{self.rank}", "")
        self.rounds = 0

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.rounds += 1
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for place, (name, dtype, shape) in enumerate(described):
            key = f"{self.rounds}/{place}"
            content = bytearray(self.store.get(key))
            weight = torch.frombuffer(content, dtype=getattr(torch, dtype)).view(shape)
            self.model.load_weights([(name, weight)])
            self.store.set(f"{key}/{self.rank}", "")

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.store = None


@dataclass
class StoreTrainerInitInfo(TrainerInitInfo):
    backend = "store"

    master_address: str
    master_port: int
    world_size: int


class StoreTrainer(TrainerWeightTransferEngine[StoreTrainerInitInfo]):
    init_info_cls = StoreTrainerInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: StoreTrainerInitInfo, *, client: Any, source: Any = None
    ) -> StoreTrainer:
        made = cls(client=client, source=source)
        made.ranks, made.rounds = range(1, init_info.world_size), 0
        made.store = TCPStore(
            init_info.master_address,
            init_info.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=PATIENCE,
        )
        client.init_weight_transfer_engine(
            {
                "master_address": init_info.master_address,
                "master_port": init_info.master_port,
                "rank_offset": 1,
                "world_size": init_info.world_size,
            }
        )
        made.store.wait([f"here/{rank}" for rank in made.ranks])
        return made

    def send_weights(self) -> None:
        meta = self.source.metadata()
        info = {
            "names": [each.name for each in meta],
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in meta],
            "shapes": [list(each.shape) for each in meta],
        }
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as aside:
            receiving = aside.submit(self.client.update_weights, info)
            self.rounds += 1
            for place, (_, tensor) in enumerate(self.source):
                key = f"{self.rounds}/{place}"
                self.store.set(key, tensor.contiguous().numpy().tobytes())
                self.store.wait([f"{key}/{rank}" for rank in self.ranks])
            receiving.result()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.store = None


WeightTransferEngineFactory.register_engine("store", StoreEngine)
WeightTransferTrainerFactory.register_engine("store", StoreTrainer)


def connect(address: str, port: int, ranks: int, calls: Any, weights: Any) -> Any:
    """In the place of `sc_ray.trainer.sender.over_nccl`."""
    return WeightTransferTrainerFactory.trainer_init(
        StoreTrainerInitInfo(master_address=address, master_port=port, world_size=ranks, rank=0),
        client=calls,
        source=weights,
    )
