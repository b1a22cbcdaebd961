"""What is used of mlx-lm, without its package having run (``light_imports``)."""

from typing import Any

from splitinfer.models.light_imports import module

utils: Any = module("mlx_lm", "utils")

from mlx_lm.models import base, cache, rope_utils, switch_layers  # noqa: E402 - by now the package is light
from mlx_lm.models.base import create_causal_mask  # noqa: E402
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache  # noqa: E402
from mlx_lm.sample_utils import apply_top_k, apply_top_p, make_repetition_penalty  # noqa: E402

__all__ = [
    "CacheList",
    "KVCache",
    "apply_top_k",
    "apply_top_p",
    "base",
    "cache",
    "create_causal_mask",
    "make_prompt_cache",
    "make_repetition_penalty",
    "rope_utils",
    "switch_layers",
    "utils",
]
