"""Which rows of a batch each trainer worker takes: the same answer on all of them, unasked."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from sc_core import (
    Batch,
    SampleId,
)


def shares_of(batch: Batch, workers: int, *, trained: bool) -> list[tuple[SampleId, ...]]:
    """Every worker's rows, by rank, in the batch's order.

    A row counts as its group's mean of generated tokens, which is what a batch knows; groups
    are split wherever that balances better.

    Args:
        trained: only the rows that a gradient may come from; else all of them.
    """
    wanted: Collection[SampleId] = frozenset(batch.trained_ids) if trained else batch.sample_ids
    rows: list[SampleId] = []
    tokens: list[float] = []
    for group in batch.groups:
        own = [row for row in group.sample_ids if row in wanted] if trained else group.sample_ids
        rows += own
        tokens += [group.tokens / len(group.sample_ids)] * len(own)
    return [tuple(rows[at] for at in share) for share in balanced(tokens, workers)]


def balanced(tokens: Sequence[float], workers: int) -> list[list[int]]:
    """Deal items of so many tokens to workers; each one's item numbers, ascending.

    The longest go first, each to the worker that has the fewest tokens so far, and among these
    the fewest items, then the lowest rank: longest processing time first (Graham 1969, SIAM J.
    Appl. Math. 17). The fullest worker gets at most 4/3 of what it would in the best partition.
    In O(n log n).
    """
    dealt: list[list[int]] = [[] for _ in range(workers)]
    waiting = [(0.0, 0, rank) for rank in range(workers)]
    for number in sorted(range(len(tokens)), key=lambda number: -tokens[number]):
        held, items, rank = waiting[0]
        dealt[rank].append(number)
        heapq.heapreplace(waiting, (held + tokens[number], items + 1, rank))
    return [sorted(numbers) for numbers in dealt]
