"""Loads the tokenizer in a model's folder as mlx-lm does, but without transformers' list of all of its models.

transformers makes that list of 3,000 files when it is imported, which takes it most of a second. A tokenizer needs the
modules of its own class only. What needs more, gets all of transformers (``light_package``).
"""

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from splitinfer.light_package import register

_PLACES = {
    "AutoTokenizer": "models.auto.tokenization_auto",
    "GPT2Tokenizer": "models.gpt2.tokenization_gpt2",
    "GemmaTokenizer": "models.gemma.tokenization_gemma",
    "LlamaTokenizer": "models.llama.tokenization_llama",
    "PreTrainedTokenizer": "tokenization_python",
    "PreTrainedTokenizerFast": "tokenization_utils_tokenizers",
    "Qwen2Tokenizer": "models.qwen2.tokenization_qwen2",
}
"""Where transformers has what its modules read of the package itself for the usual tokenizers."""


def load(path: Path, eos_token_ids: Sequence[int] | int | None) -> Any:
    """Return the tokenizer in the folder ``path``, an mlx-lm ``TokenizerWrapper``. Raise whatever the folder's files
    make mlx-lm and transformers raise."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as mlx-lm's own __init__ does
    register("mlx_lm")
    register("transformers", _PLACES, version("transformers"))
    register("transformers.models")
    from mlx_lm.tokenizer_utils import load as load_wrapper  # here, because importing it takes a while

    return load_wrapper(path, eos_token_ids=eos_token_ids)
