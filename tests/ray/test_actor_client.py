"""A client of somebody else's in a real Ray actor, with values in a TensorDict, as a data plane."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
import torch
from tensordict import TensorDict

from sc_core import (
    AsyncClient,
    CallTimeout,
    ClientStore,
    ControllerConfig,
    DataPlane,
    DataPlaneError,
    Prompt,
    PromptList,
    Sample,
    StepTrainer,
    ThreadedClient,
    WorkerDied,
    audit_run,
    decode,
    open_run,
)
from sc_core.testing import ROW_CHECKS, Subject, snapshot_restores_the_store
from sc_core.testing.conformance import Check
from sc_ray.actor_client import ActorClient, TensorDictFields

pytestmark = pytest.mark.anyio
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import a test
DTYPES = {"int": torch.int64, "float": torch.float32, "bool": torch.bool}
BOTH = pytest.mark.parametrize("where", ["actor", "thread"])


class Client:
    """Rows of tensors by partition, with the calls and the shapes of NeMo RL's client.

    A column of equal lengths comes back dense, any other nested.
    """

    def __init__(self) -> None:
        self.partitions: dict[str, dict[str, dict[str, torch.Tensor]]] = {}

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        rows = self.partitions.setdefault(partition_id, {})
        columns = {} if fields is None else {name: fields[name].unbind() for name in fields.keys()}
        for at, one in enumerate(sample_ids):
            row = rows.setdefault(one, {})
            row.update({name: values[at].clone() for name, values in columns.items()})
        return {"sample_ids": sample_ids, "tags": tags}

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        rows = self.partitions.get(partition_id, {})
        columns = {}
        for name in select_fields:
            values = [rows[one][name] for one in sample_ids]
            even = len({len(value) for value in values}) == 1
            columns[name] = (
                torch.stack(values)
                if even
                else torch.nested.as_nested_tensor(values, layout=torch.jagged)
            )
        return TensorDict(columns, batch_size=len(sample_ids))

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        rows = self.partitions.get(partition_id, {})
        for one in list(rows) if sample_ids is None else sample_ids:
            del rows[one]

    def list_sample_ids(self, partition_id: str) -> list[str]:
        return list(self.partitions.get(partition_id, {}))

    def save_checkpoint(self, checkpoint_dir: str | Path, *, metadata: Any = None) -> None:
        directory = Path(checkpoint_dir)
        directory.mkdir(parents=True)
        torch.save([self.partitions, metadata], directory / "rows.pt")

    def load_checkpoint(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        loaded = torch.load(Path(checkpoint_dir) / "rows.pt", weights_only=True)
        self.partitions, metadata = loaded
        return dict(metadata)

    def close(self) -> None:
        self.partitions = {}

    def hang(self) -> None:
        """Keep the actor busy."""
        time.sleep(2)


@pytest.fixture(scope="module")
def actor(local_ray: None) -> Any:
    """One process with torch for all tests; `close` makes its store a new one."""
    return ray.remote(num_cpus=0)(Client).remote()


@pytest.fixture
def new_store(where: str, actor: Any) -> Callable[[], ClientStore]:
    def build() -> AsyncClient:
        return ActorClient(actor) if where == "actor" else ThreadedClient(Client)

    return lambda: ClientStore(build, fields=TensorDictFields())


@pytest.fixture
def store(new_store: Callable[[], ClientStore]) -> ClientStore:
    return new_store()


def subject_of(store: ClientStore) -> Subject:
    async def connect() -> DataPlane:
        return store.client()

    return Subject(
        store,
        connect,
        value=lambda kind, numbers: torch.tensor(numbers, dtype=DTYPES[kind]),
        same=lambda one, other: one.dtype == other.dtype and torch.equal(one, other),
    )


@BOTH
@pytest.mark.parametrize("check", ROW_CHECKS, ids=lambda check: check.__name__)
async def test_rows(check: Check, store: ClientStore) -> None:
    async with store:
        await check(subject_of(store))


@BOTH
async def test_snapshot(store: ClientStore, tmp_path: Path) -> None:
    async with store:
        await snapshot_restores_the_store(subject_of(store), tmp_path / "snapshot")


@pytest.mark.parametrize("where", ["thread"])
async def test_what_is_no_tensor_is_refused_by_name(store: ClientStore) -> None:
    with pytest.raises(DataPlaneError, match="column x, row 1: a value must be a 1-D tensor"):
        await store.put_samples(["a", "b"], {"x": [torch.zeros(2), 3.0]})


def test_a_number_per_row_and_a_column_that_is_missing() -> None:
    fields = TensorDict({"x": torch.tensor([1, 2]), "y": torch.zeros(2, 3)}, batch_size=2)
    assert TensorDictFields().decode(fields, ["x"]) == {"x": [torch.tensor([1]), torch.tensor([2])]}
    assert [row.shape for row in TensorDictFields().decode(fields, ["y"])["y"]] == [(3,), (3,)]
    with pytest.raises(DataPlaneError, match="column z is missing"):
        TensorDictFields().decode(fields, ["z"])


async def test_an_actor_that_died_is_named(local_ray: None) -> None:
    class Empty:
        def list_sample_ids(self, partition_id: str) -> list[str]:
            return []

    actor = ray.remote(num_cpus=0)(Empty).remote()
    store = ClientStore(lambda: ActorClient(actor, name="rows"))
    assert await store.is_untouched()
    ray.kill(actor)
    with pytest.raises(WorkerDied, match="rows died"):
        while True:  # until it is dead
            await store.list_sample_ids()


async def test_a_call_past_its_deadline_is_named(actor: Any) -> None:
    store = ClientStore(lambda: ActorClient(actor), fields=TensorDictFields(), deadline_s=0.5)
    ray.get(actor.list_sample_ids.remote("rollouts"))  # it is up
    busy = actor.hang.remote()
    with pytest.raises(CallTimeout, match=r"put_samples did not return within 0\.5 s"):
        await store.put_samples(["a"], {"x": [torch.zeros(1)]})
    ray.get(busy)
    await store.aclose()  # the row has arrived meanwhile


class Policy(StepTrainer):
    columns = ("answer", "advantage")

    def __init__(self, fetch: Any, state: Any) -> None:
        super().__init__(fetch, state)
        self.at_step: dict[int | None, Any] = {}  #: what to call when that step learns

    async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        await anyio.sleep(0.005)
        reward = float((prompt.ordinal + sibling) % 3 == 0)
        fields = {"answer": torch.tensor([sibling]), "reward": torch.tensor([reward])}
        return Sample(fields=fields, reward=reward)

    def learn(self, columns: Any) -> None:
        self.state["rows"] += len(columns["answer"])
        self.at_step.get(self.state["rows"] // 4, lambda: None)()


class Advantages:
    select_fields = ("reward", "masked")
    scope: Any = "group"
    heavy = False

    def estimate(self, columns: Any, group_sizes: Any) -> dict[str, list[Any]]:
        return {"advantage": [reward - 0.5 for reward in columns["reward"]]}


@BOTH
async def test_a_run_that_crashes_and_resumes_is_audited(
    new_store: Callable[[], ClientStore], tmp_path: Path
) -> None:
    config = decode(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2,
                     "max_num_steps": 12},
            "checkpointing": {"save_period": 2},
        },
        ControllerConfig,
    )  # fmt: skip

    async def live(crash_at_step: int | None) -> Policy:
        async with new_store() as store, anyio.create_task_group() as beside:
            policy = Policy(store.get_samples, {"rows": 0})

            async with open_run(
                tmp_path, config, store=store, source=PromptList(range(50)), worker=policy,
                trainer=policy, estimator=Advantages(),
            ) as controller:  # fmt: skip
                policy.at_step[crash_at_step] = beside.cancel_scope.cancel
                await controller.run()
                beside.cancel_scope.cancel()
                assert await store.list_sample_ids() == controller.rows() | controller.suspects()
        return policy

    await live(crash_at_step=5)
    last = await live(crash_at_step=None)
    assert last.state == {"rows": 48}  # 12 steps of 4, over both lives
    report = audit_run(tmp_path)
    assert report.ok, report.violations
