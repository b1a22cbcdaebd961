"""Reads a model folder's ``generation_config.json``: recommended sampling values, and the tokens that end an answer.

The file is optional. A problem with it is one warning in the log, never an error.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitinfer.core.model_config import token_ids
from splitinfer.core.sampling_defaults import Recommended, recommended

FILE = "generation_config.json"
_END = "eos_token_id"

_log = logging.getLogger(__name__)


def read_recommended(folder: Path) -> Recommended:
    """The sampling values that the folder's generation config recommends; nothing where there is no such file."""
    config, problem = _read(folder)
    if problem is not None:
        _log.warning("%s is ignored: %s", folder / FILE, problem)
    found = recommended(config)
    if found.problems:
        _log.warning("ignored values in %s: %s", folder / FILE, "; ".join(found.problems))
    return found


def end_tokens(folder: Path, config: Mapping[str, Any]) -> int | list[int] | None:
    """The token ids that end an answer: the generation config's, else those of the model's ``config``, as in mlx-lm;
    else those of its language model's part, as in transformers."""
    given = token_ids(_read(folder)[0], _END)
    return token_ids(config, _END) if given is None else given


def _read(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """The file's fields, and what is wrong with the file, if anything."""
    try:
        config = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, None
    except (ValueError, RecursionError, OSError) as error:
        return {}, f"it cannot be read ({error})"
    if not isinstance(config, dict):
        return {}, "it is not a JSON object"
    return config, None
