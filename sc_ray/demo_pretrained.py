"""`python -m sc_ray.demo_pretrained`: a real pretrained model learns to add, for a few minutes.

SmolLM2-135M-Instruct is made from the package that carries it, once; then it is asked sums in its
chat template. The last line says how many of the held-out sums it got right before and after,
taking the likeliest token each time. Generation is by vLLM where it is installed, else by torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from sc_core import (
    ScError,
)
from sc_ray.run_directory import METRICS

MODEL_DIR = Path("runs/models/smollm2-135m")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sc_ray.demo_pretrained", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-pretrained"), metavar="RUN")
    parser.add_argument("--model-dir", type=Path, default=MODEL_DIR, metavar="DIR")
    parser.add_argument("--config", default="pretrained", metavar="NAME|FILE")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_args()
    try:
        model = _model(options.model_dir)
    except (ScError, OSError) as exc:
        sys.stderr.write(f"demo-pretrained: error: {exc}\n")
        return 1
    engine = "torch" if importlib.util.find_spec("vllm") is None else "vllm"
    command = [sys.executable, "-m", "sc_ray", "train"]
    command += ["--config", options.config, "--out", str(options.out)]
    command += [f"policy.model.pretrained={model}", f"generation.engine={engine}"]
    status = subprocess.run([*command, *options.settings], check=False).returncode
    if status == 0:
        _say(before_and_after(options.out / METRICS))
    return status


def _model(directory: Path) -> Path:
    if not directory.is_dir():
        _say(f"converting SmolLM2-135M-Instruct into {directory}: half a minute, once")
    from sc_ray.pretrained import smollm2  # torch comes with it, and takes its seconds

    return smollm2(directory.absolute())


def before_and_after(metrics: Path) -> str:
    """The first and the last evaluation of a run, in words."""
    found: list[tuple[int, float]] = []
    for line in metrics.read_bytes().splitlines():
        try:
            entry = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            continue  # torn by a crash
        if isinstance(entry.get("val/reward"), int | float):
            found.append((entry["step"], entry["val/reward"]))
    if len(found) < 2:
        return "there are no two evaluations to compare"
    (first, before), (last, after) = found[0], found[-1]
    return (
        f"held-out sums right: {before:.0%} before (step {first}), {after:.0%} after (step {last})"
    )


def _say(line: str) -> None:
    sys.stdout.write(f"demo-pretrained: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
