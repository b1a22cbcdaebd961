"""How wide a model's hidden states are, without fetching anything."""

from pathlib import Path

import huggingface_hub

from splitinfer.core.layout import Layout
from splitinfer.demo import DEMO_MODELS
from splitinfer.doctor.advice import Hidden
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import read_config
from splitinfer.models.memory import on_gpu

USUAL = 4096


def hidden_of(layout: Layout) -> Hidden:
    """Of the layout's model if its configuration is on this machine; else what is usual."""
    size = _bytes_per_value(layout.dtype)
    values = None if layout.model is None else _values(layout.model)
    if values is None:
        return Hidden(USUAL, size, "assumed")
    return Hidden(values, size, str(layout.model))


def _values(model: str) -> int | None:
    try:
        folder = _folder(model)
        config = None if folder is None else read_config(folder)
    except (ModelError, OSError, ValueError, RuntimeError):
        return None
    found = (config or {}).get("hidden_size") or ((config or {}).get("text_config") or {}).get("hidden_size")
    return found if isinstance(found, int) and found > 0 else None


def _folder(model: str) -> Path | None:
    """Where the model's configuration lies, if it does on this machine."""
    if model in DEMO_MODELS:
        return DEMO_MODELS[model]
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    found = huggingface_hub.try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _bytes_per_value(dtype: str) -> int:
    """A model's own dtype has two bytes nearly always; on a processor "auto" is float32."""
    if dtype == "float32" or (dtype == "auto" and not on_gpu()):
        return 4
    return 2
