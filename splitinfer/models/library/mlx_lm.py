"""Imports the modules that are used of mlx-lm without running its package's ``__init__`` (``light_imports``)."""

from typing import Any

from splitinfer.models.library.light_imports import module

utils: Any = module("mlx_lm", "utils")
sample_utils: Any = module("mlx_lm", "sample_utils")

from mlx_lm.models import base, cache, rope_utils, switch_layers  # noqa: E402 - by now the package is light

__all__ = ["base", "cache", "rope_utils", "sample_utils", "switch_layers", "utils"]
