"""Names of files that machines may give each other: an allowed form, never a path, never code.

Only these files are sent and taken, and only under names of this form: what else lies in a model's folder stays there.
Tensors are not stored under their names at all: they lie in files that this machine names itself (``store.parts``).
"""

import re

CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json")
"""What a stage needs beside its tensors, as far as the model has it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")  # no separator, no leading dot, nothing that a shell minds
_SMALL = re.compile(
    r"(config|generation_config|hf_quant_config|tokenizer[\w.-]*|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(vocab|merges)\.txt|[\w.-]+\.(jinja|tiktoken)|[\w.-]*(tokenizer|spiece|sentencepiece)[\w.-]*\.model"
)
_WEIGHTS = ".safetensors"
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")  # devices, to some file systems


def is_small_file(name: str) -> bool:
    """Whether a file of this name is taken beside the weights: configuration, tokenizer, chat template.

    >>> [is_small_file(name) for name in ("config.json", "../config.json", "a/config.json", "model.py", "keys.json")]
    [True, False, False, False, False]
    """
    return _is_plain(name) and _SMALL.fullmatch(name) is not None


def is_weight_file(name: str) -> bool:
    """Whether this may be the name of a file of weights, of which tensors are taken."""
    return _is_plain(name) and name.endswith(_WEIGHTS)


def is_tensor(name: str) -> bool:
    """Whether this may be a tensor's name."""
    return 0 < len(name) <= 512 and name.isprintable() and name != "__metadata__"


def _is_plain(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name and not _RESERVED.fullmatch(name.lower())
