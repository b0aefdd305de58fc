"""Text to token ids and back: one token per character, or what a pretrained model brings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from jinja2 import TemplateError
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from sc_core import (
    ConfigError,
    DataFailure,
    RestoreError,
)
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import transformers
else:
    transformers = lazy("transformers")

PAD, EOS = "<pad>", "<eos>"
_GENERATION = "generation_config.json"
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, KeyError)


class Tokenizer:
    """A Hugging Face tokenizer, so that what `save` writes is what vLLM and others load.

    Args:
        eos_ids: tokens that end a completion besides the tokenizer's own end-of-text token; some
            chat models end a turn by another one.

    Raises:
        ValueError: there is no such token at all.
    """

    def __init__(
        self, pipeline: transformers.PreTrainedTokenizerFast, eos_ids: Iterable[int] = ()
    ) -> None:
        self._pipeline = pipeline
        self.vocab_size: int = len(pipeline)
        own: int | None = pipeline.eos_token_id
        self.eos_ids: frozenset[int] = frozenset(eos_ids) | ({own} if own is not None else set())
        if not self.eos_ids:
            raise ValueError("it has no end-of-text token: no completion could end")
        self.eos_id: int = min(self.eos_ids) if own is None else own
        self.has_chat_template: bool = pipeline.chat_template is not None
        pad = pipeline.pad_token_id
        self.pad_id: int = self.eos_id if pad is None else pad  #: masked wherever it is used
        # None: a vocabulary that can spell any text
        self._characters: dict[str, int] | None = None
        if isinstance(pipeline.backend_tokenizer.model, models.WordLevel):
            self._characters = {t: number for t, number in self.vocabulary().items() if len(t) == 1}

    @classmethod
    def of_characters(cls, alphabet: Iterable[str]) -> Tokenizer:
        """One token for each character of `alphabet`, after padding (0) and end of text (1).

        Raises:
            ConfigError: the alphabet is empty, or an item of it is not one character.
        """
        characters = sorted(set(alphabet))
        for item in characters or [""]:
            if len(item) != 1:
                raise ConfigError(f"a character tokenizer can't be made of {item!r}")
        ids = {token: number for number, token in enumerate([PAD, EOS, *characters])}
        pipeline = Pipeline(models.WordLevel(ids))
        pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        pipeline.decoder = decoders.Fuse()
        return cls(
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=pipeline,
                pad_token=PAD,
                eos_token=EOS,
                split_special_tokens=True,  # "<eos>" in a prompt is five characters
                clean_up_tokenization_spaces=False,
            )
        )

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """What `save` wrote, or the tokenizer of a pretrained model.

        The end tokens of a `generation_config.json` beside it count as its own.

        Raises:
            RestoreError: the directory holds no tokenizer, or a damaged one.
        """
        # AutoTokenizer goes by the model beside it, and adds the special tokens of a real Qwen2
        whole = (directory / "tokenizer.json").is_file()
        kind = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
        try:
            pipeline = kind.from_pretrained(str(directory), local_files_only=True)
            return cls(pipeline, _end_tokens(directory / _GENERATION))
        except Exception as exc:  # of what is damaged the libraries raise anything
            reason = next(iter(str(exc).splitlines()), type(exc).__name__)
            raise RestoreError(f"no tokenizer can be loaded from {directory}: {reason}") from exc

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and its configuration, all of it JSON."""
        self._pipeline.save_pretrained(str(directory))
        if self.eos_ids != {self._pipeline.eos_token_id}:
            ends = msgspec.json.encode({"eos_token_id": sorted(self.eos_ids)})
            (directory / _GENERATION).write_bytes(ends)

    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        ids: dict[str, int] = self._pipeline.get_vocab()
        return ids

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """The ids of a prompt.

        Args:
            first: whether nothing comes before; many tokenizers put a token of their own there.

        Raises:
            DataFailure: a character is not in the vocabulary.
        """
        known = self._characters
        if known is None:
            encode = self._pipeline.backend_tokenizer.encode
            ids: list[int] = encode(text, add_special_tokens=first).ids
            return ids
        try:
            return [known[character] for character in text]
        except KeyError as exc:
            (unknown,) = exc.args
            raise DataFailure(
                f"the tokenizer has no token for {unknown!r} in {text!r}; it knows"
                f" {''.join(sorted(known))!r}"
            ) from None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation in the model's chat template, up to where it is to speak.

        Raises:
            DataFailure: the template refuses it: its roles, most often.
        """
        return self._encode_rendered(self._render(messages, speak=True))

    def encode_reply(self, text: str, *, after_eos: bool) -> list[int]:
        """The ids of what follows a model's turn: a reply by the user, up to the next turn.

        Args:
            after_eos: whether that turn ended in an end token; if not, one comes first here.

        Raises:
            DataFailure: the template refuses it, or shows earlier turns otherwise once there are
                later ones, so that nothing can be put after what a model has read.
        """
        said = "\N{ASTERISM}"  # in place of the turn, whose tokens stay as they were sampled
        before = [{"role": "user", "content": "1"}, {"role": "assistant", "content": said}]
        shown = self._render(before, speak=False)
        whole = self._render([*before, {"role": "user", "content": text}], speak=True)
        if not whole.startswith(shown) or said not in shown:
            raise DataFailure(
                "the chat template shows earlier turns otherwise in a longer conversation; it can't"
                " be used for several turns"
            )
        ends = self._pipeline.convert_ids_to_tokens(sorted(self.eos_ids))
        turn_end = shown[shown.rindex(said) + len(said) :]
        end = next((end for end in ends if turn_end.lstrip().startswith(end)), "")
        end = turn_end[: turn_end.index(end) + len(end)]  # with the space before it, if any
        following = turn_end[len(end) :] + whole[len(shown) :]
        return self._encode_rendered(following if after_eos else end + following)

    def _render(self, messages: Sequence[Mapping[str, str]], *, speak: bool) -> str:
        try:
            shown: Any = self._pipeline.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=speak,
            )
        except _TEMPLATE_ERRORS as exc:
            raise DataFailure(f"the chat template refuses {list(messages)!r}: {exc}") from exc
        return str(shown)

    def _encode_rendered(self, text: str) -> list[int]:
        ids: list[int] = self._pipeline.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        text: str = self._pipeline.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=False
        )
        return text

    def completion_text(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without the end token that finished it.

        A special token anywhere else stays visible: it is no part of a right answer.
        """
        ended = len(token_ids) > 0 and token_ids[-1] in self.eos_ids
        return self.decode(token_ids[:-1] if ended else token_ids)


def saved_vocabulary(directory: Path) -> dict[str, int] | None:
    """What `save` wrote of `vocabulary()`, read in no time; None if it can't be."""
    try:
        return dict(Pipeline.from_file(str(directory / "tokenizer.json")).get_vocab())
    except Exception:  # the only type that this library raises
        return None


def _end_tokens(path: Path) -> list[int]:
    """`eos_token_id` of a `generation_config.json`, which is one number, several or none.

    Raises:
        ValueError: it is something else.
    """
    if not path.is_file():
        return []
    ends = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig).eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else ends


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
