"""Learns to add digits by trial and error: asyncio, rows in a dict. Run it again: it goes on."""

import asyncio
import json
import random
import signal
import sys
from pathlib import Path

import sc_core as sc


class Rows(dict[str, dict[str, object]]):  # the data plane
    async def put_samples(self, ids: list[str], _: str, fields: sc.Columns, tags: object) -> None:
        for at, row in enumerate(ids):
            self.setdefault(row, {}).update({name: fields[name][at] for name in fields})
    async def get_samples(self, ids: list[str], _: str, names: list[str]) -> sc.Columns:
        return {name: [self[row][name] for row in ids] for name in names}
    async def clear_samples(self, ids: list[str], _: str) -> None:
        for row in ids:
            del self[row]
    async def list_sample_ids(self, _: str) -> list[str]:
        return list(self)
    async def save_checkpoint(self, directory: Path, *, metadata: object) -> None:
        directory.mkdir()
        (directory / "rows.json").write_text(json.dumps([self, metadata]))
    async def load_checkpoint(self, directory: Path) -> dict[str, object]:
        rows, metadata = json.loads((directory / "rows.json").read_text())
        self.update(rows)
        return dict(metadata)
    async def close(self) -> None: ...


class Policy(sc.StepTrainer):  # the trainer, and the worker that generates with its weights
    columns = ("question", "answer", "advantage")
    async def rollout(self, prompt: sc.Prompt, sibling: int, weight_version: int) -> sc.Sample:
        await asyncio.sleep(random.random() / 50)  # as if it were hard to generate
        answer = random.choices(range(9), [2**logit for logit in self.state[prompt.payload]])[0]
        reward = float(answer == sum(divmod(prompt.payload, 5)))
        fields = {"question": prompt.payload, "answer": answer, "reward": reward}
        return sc.Sample(fields=fields, reward=reward)
    def learn(self, columns: sc.Columns) -> None:
        for question, answer, advantage in zip(*columns.values(), strict=True):
            self.state[question][answer] += advantage  # in a group all else cancels

async def main(run_dir: Path) -> None:
    store, source = sc.ClientStore(Rows), sc.PromptList(range(25), seed=0)
    policy = Policy(store.get_samples, [[0.0] * 9 for _ in range(25)])
    async with sc.open_run(
        run_dir, sc.ControllerConfig(), store=store, source=source, worker=policy, trainer=policy
    ) as run:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, run.stop, "SIGTERM")
        await run.run()
    metrics = (run_dir / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["train/reward"] for line in metrics]
    print(f"reward {rewards[0]:.2f}, then {rewards[-1]:.2f}; {sc.audit_run(run_dir)}")

asyncio.run(main(Path(sys.argv[1] if sys.argv[1:] else "runs/sums")))
