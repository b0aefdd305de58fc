"""`python -m sc_core.testing`: explore the crashes of whole runs on in-memory ports."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from sc_core.testing.crash import Exploration, replay
from sc_core.testing.scenarios import SCENARIOS, Part, explore_part, parts_of


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sc_core.testing", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="all, if none is named")
    parser.add_argument("--sample", type=_count, metavar="N", help="about N points, evenly spread")
    parser.add_argument("--processes", type=_count, default=2, metavar="N")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument("--replay", metavar="PATH", help="of one violation, in the one scenario")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # failures are part of the play
    names: list[str] = args.scenarios or list(SCENARIOS)
    unknown = sorted(set(names) - SCENARIOS.keys())
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(SCENARIOS)}")
    if args.replay is not None:
        if len(names) != 1:
            parser.error("--replay needs the name of its scenario")
        try:
            return _replay(names[0], args.replay)
        except ValueError as exc:
            parser.error(f"--replay {args.replay}: {exc}")
    began = time.monotonic()
    total = Exploration()
    parts = [part for name in names for part in parts_of(name, args.sample, len(names))]
    for (name, points), found in _explored(parts, args.processes):
        total += found
        if not args.json:
            print(f"{name}: points {points.start} to {points.stop}: {found}", flush=True)
        for violation in found.violations if not args.json else ():
            print(f"  {violation}\n  again: {parser.prog} {name} --replay {violation.path}")
    seconds = time.monotonic() - began
    if args.json:
        print(json.dumps(total.as_dict() | {"scenarios": names, "seconds": round(seconds, 1)}))
    else:
        print(f"{len(names)} scenarios in {seconds:,.0f} s")
        print(total)
    return 1 if total.violation_count else 0


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


def _explored(parts: list[Part], processes: int) -> Iterator[tuple[Part, Exploration]]:
    if processes == 1:
        yield from zip(parts, map(explore_part, parts), strict=True)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from zip(parts, pool.map(explore_part, parts), strict=True)


def _replay(name: str, path: str) -> int:
    problems = replay(SCENARIOS[name], path)
    print("\n".join([*problems, f"{name} {path}: {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
