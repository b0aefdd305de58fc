"""What the benchmarks share: backends, interleaved rounds, tables and their JSON."""

from __future__ import annotations

import argparse
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

T = TypeVar("T")

_BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}

_PER_UNIT = {"us": 1e6, "ms": 1e3, "s": 1.0, "B": 1.0, "MB": 1.0}

#: seconds, round by round, of each contestant on each backend
Taken = dict[str, dict[str, list[float]]]


class Row(msgspec.Struct, frozen=True):
    """One contestant on one backend: the median over the rounds."""

    name: str
    backend: str
    value: float
    unit: str


class Target(msgspec.Struct, frozen=True):
    """What a ratio should reach on a quiet machine."""

    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"

    def is_met(self, ratio: float) -> bool:
        return (self.at_most is None or ratio <= self.at_most) and (
            self.at_least is None or ratio >= self.at_least
        )


class Ratio(msgspec.Struct, frozen=True):
    """How many times more `above` costs than `below`, and by backend what that should be."""

    above: str
    below: str
    targets: dict[str, Target]

    def of(self, samples: Mapping[str, Sequence[float]]) -> float | None:
        """The median over the rounds of the quotient within one round.

        A machine that slows down for a while slows both alike, which a quotient of two medians
        would not see.
        """
        if self.above not in samples or self.below not in samples:
            return None
        pairs = zip(samples[self.above], samples[self.below], strict=True)
        return statistics.median(above / below for above, below in pairs)


def arguments(description: str, **flags: str) -> argparse.Namespace:
    """`--quick` and `--json FILE`, which every benchmark takes, and `flags` with their help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a few short rounds: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    for name, told in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=told)
    return parser.parse_args()


def installed(*modules: str) -> bool:
    return all(find_spec(module) is not None for module in modules)


def backends() -> list[str]:
    """The backends installed here, by the name a table shows."""
    return [name for name in _BACKENDS if name == "asyncio" or installed(name)]


def run(backend: str, main: Callable[[], Awaitable[T]]) -> T:
    name, options = _BACKENDS[backend]
    return anyio.run(main, backend=name, backend_options=options)


async def interleaved(
    contestants: Mapping[str, Callable[[], Awaitable[float]]], rounds: int
) -> dict[str, list[float]]:
    """What each contestant took in each round; every round asks each of them once."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, measure in contestants.items():
            samples[name].append(await measure())
    return samples


def report(
    taken: Taken,
    asked: Mapping[str, Ratio],
    json: Path | None,
    unit: str = "us",
    units: Mapping[str, str] = {},
) -> None:
    """Print the medians and the ratios beside their targets, and write both as JSON if asked.

    Contestants are shown in `unit`, or what `units` says of them by name.
    """
    rows = [
        Row(name, backend, statistics.median(values) * _PER_UNIT[shown], shown)
        for backend, samples in taken.items()
        for name, values in samples.items()
        for shown in [units.get(name, unit)]
    ]
    ratios = {
        name: {
            backend: value
            for backend, samples in taken.items()
            if (value := ratio.of(samples)) is not None
        }
        for name, ratio in asked.items()
    }
    backends = list(taken)
    cells = {(row.name, row.backend): f"{row.value:.4g} {row.unit}" for row in rows}
    _print_table("", backends, cells)
    print()
    cells = {
        (name, backend): _judged(value, asked[name].targets.get(backend))
        for name, values in ratios.items()
        for backend, value in values.items()
    }
    _print_table("ratio", backends, cells)
    if json is not None:
        encoded = msgspec.json.encode({"rows": rows, "ratios": ratios})
        json.write_bytes(msgspec.json.format(encoded) + b"\n")


def _judged(ratio: float, target: Target | None) -> str:
    if target is None:
        return f"{ratio:.2f}"
    return f"{ratio:.2f} ({target}{'' if target.is_met(ratio) else ', missed'})"


def _print_table(corner: str, columns: Sequence[str], cells: Mapping[tuple[str, str], str]) -> None:
    lines = [
        [name, *(cells.get((name, column), "-") for column in columns)]
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    header = [corner, *columns]
    first, *others = (max(map(len, column)) for column in zip(header, *lines, strict=True))
    for name, *values in [header, *lines]:
        padded = (value.rjust(width) for value, width in zip(values, others, strict=True))
        print("  ".join([name.ljust(first), *padded]).rstrip())
