"""What a port returned: believed only once it has been looked at.

It comes from other processes and from user code, and goes into ledger, index and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set, Sized
from operator import index
from typing import Any

import msgspec
from msgspec.structs import replace

from sc_core.errors import (
    DataFailure,
    DataPlaneError,
    RolloutError,
    ScError,
    WrongAnswer,
)
from sc_core.records import GroupId, PulledPrompt, Sample, SampleId

_encode = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder(enc_hook=float).encode  #: as metrics are written
_UNCHANGEABLE = frozenset({int, str, bytes, type(None)})
_MOST = 2.0**128  #: of a reward, as in float32, and so that the sum of many is finite as well
_TOKENS = range(2**48)  #: the sum of many still fits into 64 bits


def check_sample(sample: object, group: GroupId, sibling: int, *, weight_versions: range) -> Sample:
    """The sample with plain numbers in place of those of other libraries.

    `weight_versions` are those that could have produced its last token.

    Raises:
        DataFailure: its reward is not finite in float32: training on it would ruin the weights.
        RolloutError: there is none, or it has something in it that is not what it should be.
        WrongAnswer: it is something else than a sample.
    """

    def whose() -> str:
        return f"sibling {sibling} of group {group}"

    if sample is None:  # as of a worker that lost its result
        raise RolloutError(f"{whose()} came back without a result")
    if not isinstance(sample, Sample):
        raise WrongAnswer(f"worker.rollout returned {_kind(sample)} for {whose()}, not a Sample")
    if not isinstance(sample.fields, Mapping):
        raise RolloutError(f"{whose()} has {type(sample.fields).__name__} for its fields")
    if not sample.fields or not all(isinstance(name, str) for name in sample.fields):
        raise RolloutError(f"{whose()} has the columns {list(sample.fields)}, not some with names")
    try:
        reward, tokens = float(sample.reward), index(sample.tokens)
        end = sample.end_weight_version
        end = None if end is None else index(end)
    except (TypeError, ValueError, OverflowError) as exc:
        raise RolloutError(f"{whose()} has something that is not a number: {exc}") from exc
    if end is not None and end not in weight_versions:
        raise RolloutError(
            f"{whose()} ended at weight version {end}, not between its start at"
            f" {weight_versions[0]} and the present {weight_versions[-1]}"
        )
    if sample.masked is not True and sample.masked is not False:
        raise RolloutError(f"{whose()} has masked = {sample.masked!r}, which is no bool")
    engine = sample.engine
    if engine is not None and not (isinstance(engine, str) and engine.isprintable()):
        raise RolloutError(f"{whose()} has engine = {engine!r}, which no log could name")
    if sample.components != {}:
        _check_components(sample.components, whose)
    if tokens not in _TOKENS:
        raise RolloutError(f"{whose()} has {tokens} tokens")
    if not abs(reward) < _MOST:
        raise DataFailure(f"{whose()} has reward {reward}")
    if reward is sample.reward and tokens is sample.tokens and end is sample.end_weight_version:
        return sample
    return replace(sample, reward=reward, tokens=tokens, end_weight_version=end)


def _check_components(components: object, whose: Callable[[], str]) -> None:
    if not isinstance(components, Mapping):
        raise RolloutError(f"{whose()} has {_kind(components)} for the components of its reward")
    for name, value in components.items():
        if not (isinstance(name, str) and isinstance(value, float) and abs(value) < _MOST):
            raise RolloutError(f"{whose()} has {value!r} for the component {name!r} of its reward")


def check_pulled(pulled: object) -> PulledPrompt:
    """The prompt, with a position that no later call of its source can change.

    Raises:
        WrongAnswer: it is no prompt with its position, or nothing could save that position.
    """
    if not isinstance(pulled, PulledPrompt):
        raise WrongAnswer(f"source.next_prompt returned {_kind(pulled)}, not a PulledPrompt")
    try:
        encoded = _encode(pulled.position)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise WrongAnswer(
            f"source.next_prompt returned a position that can't be saved as msgpack: {exc}"
        ) from exc
    if type(pulled.position) in _UNCHANGEABLE:
        return pulled
    return replace(pulled, position=msgspec.msgpack.decode(encoded))


def check_mapping(answer: object, call: str, expected: str) -> Mapping[str, Any]:
    """
    Raises:
        WrongAnswer: it is no mapping.
    """
    if not isinstance(answer, Mapping):
        raise WrongAnswer(f"{call} returned {_kind(answer)}, not {expected}")
    return answer


def check_metrics(answer: object, call: str) -> Mapping[str, Any]:
    """
    Raises:
        WrongAnswer: these are no metrics, or no file can hold one of them; names it.
    """
    metrics = check_mapping(answer, call, "the metrics of the step")
    for name, value in metrics.items():
        try:
            if not isinstance(name, str):
                raise TypeError(f"{_kind(name)} is no name")
            _encode_json({name: value})
        except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
            raise WrongAnswer(
                f"{call} returned the metric {name!r:.60}, which no file can hold: {exc}"
            ) from exc
    return metrics


def check_count(answer: object, call: str, expected: str) -> int:
    """
    Raises:
        WrongAnswer: it is no whole number.
    """
    if not isinstance(answer, int):
        raise WrongAnswer(f"{call} returned {_kind(answer)}, not {expected}")
    return answer


def check_rows(listed: object, call: str) -> frozenset[SampleId]:
    """
    Raises:
        DataPlaneError: it is no set of row ids.
    """
    if not isinstance(listed, Set):
        raise DataPlaneError(f"{call} returned {_kind(listed)}, not a set of row ids")
    return frozenset(listed)


def check_columns(
    columns: object, call: str, names: Sequence[str], rows: int, error: type[ScError]
) -> dict[str, Any]:
    """Columns of `rows` rows, `names` among them.

    Raises:
        error: one is missing, or has too few or too many values; or these are no columns.
    """
    if not isinstance(columns, Mapping):
        raise error(f"{call} returned {_kind(columns)}, not the columns of {rows} rows")
    for name in names:
        if name not in columns:
            raise error(f"{call} returned no column {name}, but {', '.join(columns) or 'nothing'}")
    for name, values in columns.items():
        found = len(values) if isinstance(values, Sized) else _kind(values)
        if found != rows:
            raise error(f"{call} returned {found} for column {name}, not {rows} values")
    return dict(columns)


def _kind(answer: object) -> str:
    return "None" if answer is None else f"a value of type {type(answer).__name__}"


def check_put(
    sample_ids: Sequence[SampleId],
    fields: Mapping[str, Sequence[Any]],
    tags: Sequence[Mapping[str, Any]] | None,
) -> None:
    """What every `DataPlane.put_samples` refuses, before it writes.

    Raises:
        DataPlaneError: an id comes twice, or a column or the tags have another length.
    """
    if len(set(sample_ids)) != len(sample_ids):
        raise DataPlaneError(f"put_samples: an id comes twice among {len(sample_ids)} rows")
    lengths = {name: len(values) for name, values in fields.items()}
    if tags is not None:
        lengths["tags"] = len(tags)
    for name, length in lengths.items():
        if length != len(sample_ids):
            raise DataPlaneError(f"put_samples: {name}: {length} values, {len(sample_ids)} rows")
