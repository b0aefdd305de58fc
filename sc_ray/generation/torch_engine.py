"""A small generator in plain torch, for machines without vLLM and for exact tests."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from sc_ray.generation import Completion, Request
from sc_ray.generation.engine import refuse_unfit
from sc_ray.model import configure_torch, load_weights
from sc_ray.tokenizer import Tokenizer

_Tokens = tuple[int, ...]


class _Prefix(NamedTuple):
    """What the model makes of a row of tokens, and what it needs to read one more."""

    logits: torch.Tensor  #: `[1, vocabulary]`, of the token that follows
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]  #: keys and values; never changed


class TorchEngine:
    """Samples completions from a model that it alone uses.

    Every request draws from its own generator, so what it gets never depends on the order of
    requests. With `batch_invariant` its log-probs don't depend on its company either, to the
    last bit: each forward holds one row, and rows that begin alike share the beginning. Without,
    requests run together, much faster, and agree with that up to rounding.

    Not for several threads at once. `threads` is a setting of the process; see `configure_torch`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        *,
        weight_version: int = 0,
        batch_invariant: bool = False,
        max_cached_tokens: int = 16_384,
        threads: int = 1,
    ) -> None:
        configure_torch(threads)
        self.weight_version = weight_version
        self.batch_invariant = batch_invariant
        self._model: Any = model.eval()
        self._tokenizer = tokenizer
        config: Any = model.config
        self.room: int = config.max_position_embeddings  #: tokens read and written together
        self._max_cached_tokens = max_cached_tokens
        # Invariant: all of it computed by the weights of `weight_version`.
        self._prefixes: OrderedDict[tuple[int, _Tokens], _Prefix] = OrderedDict()
        self._cached_tokens = 0
        # transformers calls it past_key_values before 5.24 and warns about that name since
        forward = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in forward else "past_key_values"

    def load(self, path: Path, version: int) -> None:
        """Generate by the weights in a safetensors file from now on, as version `version`.

        Raises:
            RestoreError: the file is missing, damaged or of another model; the engine goes on
                with the weights and the version it had.
        """
        load_weights(self._model, path)
        self.weight_version = version
        self._prefixes.clear()
        self._cached_tokens = 0

    def generate(
        self, prompt_ids: Sequence[int], seed: int, max_new_tokens: int, temperature: float = 1.0
    ) -> Completion:
        """One completion; see `generate_batch`."""
        request = Request(
            prompt_ids=prompt_ids,
            seed=seed,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        return self.generate_batch([request])[0]

    @torch.inference_mode()
    def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of these requests, in their order. Blocks until all are finished.

        Raises:
            DataFailure: a prompt is empty, or leaves no room for `max_new_tokens`.
        """
        for request in requests:
            refuse_unfit(request, room=self.room)
        drafts = [_Draft(request, self._tokenizer.eos_ids) for request in requests]
        if self.batch_invariant:
            for draft in drafts:
                self._finish_alone(draft)
        elif drafts:
            self._finish_together(drafts)
        return [self._completion(draft) for draft in drafts]

    def _completion(self, draft: _Draft) -> Completion:
        return Completion(
            token_ids=draft.token_ids,
            logprobs=draft.logprobs,
            text=self._tokenizer.completion_text(draft.token_ids),
            finish_reason="eos" if draft.ended else "length",
            weight_version=self.weight_version,
        )

    # one row per forward ---------------------------------------------------------------

    def _finish_alone(self, draft: _Draft) -> None:
        tokens = tuple(draft.request.prompt_ids)
        at_once = len(tokens)
        prefix = self._read(tokens, None, at_once)
        while True:
            ((token, logprob),) = _draw(prefix.logits, [draft])
            draft.append(token, logprob)
            if draft.finished:
                return
            tokens = (*tokens, token)
            prefix = self._read(tokens, prefix, at_once)

    def _read(self, tokens: _Tokens, before: _Prefix | None, at_once: int) -> _Prefix:
        """What follows `tokens`, of which `before` is all but the last; None reads them all.

        So many were read `at_once`, and the rest one by one: other bits than in another way.
        """
        key = (at_once, tokens)
        known = self._prefixes.get(key)
        if known is not None:
            self._prefixes.move_to_end(key)
            return known
        config = self._model.config
        cache: Any = DynamicCache(before.layers if before else None, config=config)
        unread = tokens[-1:] if before else tokens
        logits = self._forward(cache, torch.tensor([unread]))
        layers = tuple((layer.keys, layer.values) for layer in cache.layers)
        prefix = self._prefixes[key] = _Prefix(logits, layers)
        self._cached_tokens += len(tokens)
        while self._cached_tokens > self._max_cached_tokens:
            (_, oldest), _ = self._prefixes.popitem(last=False)
            self._cached_tokens -= len(oldest)
        return prefix

    # many rows per forward -------------------------------------------------------------

    def _finish_together(self, drafts: list[_Draft]) -> None:
        prompts = [tuple(draft.request.prompt_ids) for draft in drafts]
        row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(map(len, row_of))
        pad = self._tokenizer.pad_id
        padded = torch.tensor([[pad] * (width - len(p)) + list(p) for p in row_of])
        attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in row_of])
        cache: Any = DynamicCache(config=self._model.config)
        logits = self._forward(cache, padded, attention)
        rows = torch.tensor([row_of[prompt] for prompt in prompts])
        logits, attention = logits[rows], attention[rows]
        cache.batch_select_indices(rows)
        while True:
            drawn = _draw(logits, drafts)
            for draft, (token, logprob) in zip(drafts, drawn, strict=True):
                draft.append(token, logprob)
            kept = [row for row, draft in enumerate(drafts) if not draft.finished]
            if not kept:
                return
            drafts = [drafts[row] for row in kept]
            cache.batch_select_indices(torch.tensor(kept))
            attention = torch.nn.functional.pad(attention[kept], (0, 1), value=1)
            last = torch.tensor([[draft.token_ids[-1]] for draft in drafts])
            logits = self._forward(cache, last, attention)

    def _forward(
        self, cache: Any, unread: torch.Tensor, attention: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the token after `unread`: `[rows, vocabulary]`. Adds to the cache."""
        arguments: dict[str, Any] = {self._cache_argument: cache}
        if attention is not None:  # rows padded in front: count positions from the first token
            positions = (attention.cumsum(-1) - 1).clamp(min=0)
            arguments["position_ids"] = positions[:, -unread.shape[1] :]
            arguments["attention_mask"] = attention
        output = self._model(input_ids=unread, use_cache=True, logits_to_keep=1, **arguments)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


class _Draft:
    """A completion under way."""

    def __init__(self, request: Request, eos_ids: frozenset[int]) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finished = False
        self.ended = False  #: by an end token
        self._eos_ids = eos_ids
        self._generator = torch.Generator().manual_seed(request.seed)

    def uniform(self) -> torch.Tensor:
        return torch.rand((), dtype=torch.float64, generator=self._generator)

    def append(self, token: int, logprob: float) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        full = len(self.token_ids) == self.request.max_new_tokens
        self.ended = token in self._eos_ids
        self.finished = full or self.ended


def _draw(logits: torch.Tensor, drafts: Sequence[_Draft]) -> list[tuple[int, float]]:
    """One token and its log-prob per draft, by inverting the cumulative distribution."""
    temperatures = torch.tensor([[draft.request.temperature] for draft in drafts])
    greedy = temperatures[:, 0] == 0
    logprobs = torch.log_softmax(logits / temperatures.masked_fill(greedy[:, None], 1.0), dim=-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    aims = torch.stack([draft.uniform() for draft in drafts])[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, aims, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), sampled)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0].masked_fill(greedy, 0.0)
    return list(zip(tokens.tolist(), chosen.tolist(), strict=True))
