"""Text to token ids and back: one token per character, or what a pretrained model brings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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


class Tokenizer:
    """A Hugging Face tokenizer, so that what `save` writes is what vLLM and others load."""

    def __init__(self, pipeline: transformers.PreTrainedTokenizerFast) -> None:
        self._pipeline = pipeline
        self.vocab_size: int = len(pipeline)
        self.eos_id: int = pipeline.eos_token_id
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

        Raises:
            RestoreError: the directory holds no tokenizer, or a damaged one.
        """
        # AutoTokenizer goes by the model beside it, and adds the special tokens of a real Qwen2
        whole = (directory / "tokenizer.json").is_file()
        kind = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
        try:
            return cls(kind.from_pretrained(str(directory), local_files_only=True))
        except (OSError, ValueError, KeyError) as exc:
            reason = str(exc).splitlines()[0]
            raise RestoreError(f"no tokenizer can be loaded from {directory}: {reason}") from exc

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and its configuration, all of it JSON."""
        self._pipeline.save_pretrained(str(directory))

    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        ids: dict[str, int] = self._pipeline.get_vocab()
        return ids

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt.

        Raises:
            DataFailure: a character is not in the vocabulary.
        """
        known = self._characters
        if known is None:
            ids: list[int] = self._pipeline.backend_tokenizer.encode(text).ids
            return ids
        try:
            return [known[character] for character in text]
        except KeyError as exc:
            (unknown,) = exc.args
            raise DataFailure(
                f"the tokenizer has no token for {unknown!r} in prompt {text!r}; it knows"
                f" {''.join(sorted(known))!r}"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        text: str = self._pipeline.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=False
        )
        return text

    def completion_text(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without the end-of-text token that finished it.

        A special token anywhere else stays visible: it is no part of a right answer.
        """
        ended = len(token_ids) > 0 and token_ids[-1] == self.eos_id
        return self.decode(token_ids[:-1] if ended else token_ids)
