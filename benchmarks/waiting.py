"""A generator that waits instead of computing, as engines on other machines look from here."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from math import log
from pathlib import Path

import anyio

from sc_ray.generation import Completion, Request
from sc_ray.generation.engine import NO_WEIGHTS, GenerationSpec
from sc_ray.parcels import Content

WAIT = "SC_BENCH_WAIT_S"  #: environment variable: seconds that the slowest request takes


class WaitingEngine:
    """An `Engine` whose completions are random tokens, each after half to all of the wait."""

    def __init__(self, spec: GenerationSpec) -> None:
        self._tokenizer = spec.tokenizer
        self._wait_s = float(os.environ[WAIT])
        self._version = NO_WEIGHTS
        self._open = anyio.Event()
        self._open.set()
        self.room = spec.model.max_position_embeddings

    @property
    def receiver(self) -> None:
        pass

    async def start(self) -> None:
        pass

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await self._open.wait()
        drawn = random.Random(requests[0].seed)
        await anyio.sleep(self._wait_s * (0.5 + 0.5 * drawn.random()))
        return [self._completion(request) for request in requests]

    def _completion(self, request: Request) -> Completion:
        drawn = random.Random(request.seed)
        vocabulary = self._tokenizer.vocab_size
        tokens = [drawn.randrange(vocabulary) for _ in range(request.max_new_tokens)]
        return Completion(
            token_ids=tokens,
            logprobs=[-log(vocabulary)] * len(tokens),
            text=self._tokenizer.completion_text(tokens),
            finish_reason="length",
            weight_version=self._version,
        )

    async def pause(self) -> None:
        self._open = anyio.Event()

    async def resume(self) -> None:
        self._open.set()

    async def load(self, path: Path, version: int) -> int:
        self._version = version
        return version

    async def load_content(self, content: Content, version: int) -> int:
        self._version = version
        return version

    async def check(self) -> None:
        pass

    def close(self) -> None:
        pass
