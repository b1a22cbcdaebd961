"""Writes model folders as mlx-lm reads them: config, tokenizer, and weights in float16."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from demo_training.model import MAX_POSITIONS, Model, named
from demo_training.tokenizer import END
from splitinfer.errors import ConfigError

WEIGHTS = "model.safetensors"
# Nothing stands between the user's text and the answer, so the next turn's prompt begins with the generated tokens.
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}  # so small a model repeats itself when greedy
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] != 'user' and not loop.last %}\n\n{% endif %}{% endfor %}"
)


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be written, before the training."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".probe").touch()
        (out / ".probe").unlink()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from error


def open_folder(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Make a model folder with everything but the weights."""
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    tokenizer_config = {**names, "model_max_length": MAX_POSITIONS, "chat_template": CHAT_TEMPLATE}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WEIGHTS).unlink(missing_ok=True)  # those of another run would not fit the new config
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(SAMPLING, indent=1) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1) + "\n")
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}.") from error


def save_weights(model: Model, folder: Path) -> None:
    """Write the weights in float16, atomically: after a crash the folder has the old weights or the new ones."""
    weights = {name: w.astype(mx.float16) for name, w in named(model).items()}
    partial = folder / f".partial-{WEIGHTS}"  # not among the "model*.safetensors" that mlx-lm reads
    try:
        mx.save_safetensors(str(partial), weights, metadata={"format": "mlx"})
        partial.replace(folder / WEIGHTS)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"the weights cannot be written to {folder}: {error}") from error
