"""Learns rock, paper, scissors: trio, rows in SQLite behind a thread. Run it again: it goes on."""

import json
import random
import sqlite3
import sys
from pathlib import Path

import sc_core as sc
import trio


class Table(sqlite3.Connection):  # the data plane; its calls block
    def __init__(self) -> None:
        super().__init__(":memory:", check_same_thread=False, isolation_level=None)
        self.execute("CREATE TABLE cells (row, name, value, PRIMARY KEY (row, name))")
    def put_samples(self, ids: list[str], _: str, fields: sc.Columns, tags: object) -> None:
        cells = [(row, name, fields[name][at]) for name in fields for at, row in enumerate(ids)]
        self.executemany("REPLACE INTO cells VALUES (?, ?, ?)", cells)
    def get_samples(self, ids: list[str], _: str, names: list[str]) -> sc.Columns:
        cells = {(row, name): value for row, name, value in self.execute("SELECT * FROM cells")}
        return {name: [cells[row, name] for row in ids] for name in names}
    def clear_samples(self, ids: list[str], _: str) -> None:
        self.executemany("DELETE FROM cells WHERE row = ?", [(row,) for row in ids])
    def list_sample_ids(self, _: str) -> list[str]:
        return [row for (row,) in self.execute("SELECT DISTINCT row FROM cells")]
    def save_checkpoint(self, directory: Path, *, metadata: object) -> None:
        directory.mkdir()
        (directory / "metadata.json").write_text(json.dumps(metadata))
        self.execute("VACUUM INTO ?", [str(directory / "rows.sqlite")])
    def load_checkpoint(self, directory: Path) -> dict[str, object]:
        self.execute("ATTACH ? AS saved", [str(directory / "rows.sqlite")])
        self.execute("INSERT INTO cells SELECT * FROM saved.cells")
        return dict(json.loads((directory / "metadata.json").read_text()))


class Policy(sc.StepTrainer):  # the trainer, and the worker that generates with its weights
    columns = ("theirs", "ours", "advantage")
    async def rollout(self, prompt: sc.Prompt, sibling: int, weight_version: int) -> sc.Sample:
        await trio.sleep(random.random() / 50)  # as if it were hard to generate
        ours = random.choices("rps", [2**x for x in self.state[prompt.payload].values()])[0]
        reward = float(ours + prompt.payload in ("pr", "sp", "rs"))
        fields = {"theirs": prompt.payload, "ours": ours, "reward": reward}
        return sc.Sample(fields=fields, reward=reward)
    def learn(self, columns: sc.Columns) -> None:
        for theirs, ours, advantage in zip(*columns.values(), strict=True):
            self.state[theirs][ours] += advantage  # in a group all else cancels

async def main(run_dir: Path) -> None:
    store, source = sc.ClientStore(lambda: sc.ThreadedClient(Table)), sc.PromptList("rps")
    policy = Policy(store.get_samples, {move: dict.fromkeys("rps", 0.0) for move in "rps"})
    async with sc.open_run(
        run_dir, sc.ControllerConfig(), store=store, source=source, worker=policy, trainer=policy
    ) as run:
        await run.run()
    metrics = (run_dir / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["train/reward"] for line in metrics]
    print(f"reward {rewards[0]:.2f}, then {rewards[-1]:.2f}; {sc.audit_run(run_dir)}")

trio.run(main, Path(sys.argv[1] if sys.argv[1:] else "runs/moves"))
