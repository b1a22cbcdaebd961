"""The size of a model's hidden states, without downloads, and the time that packing them takes on this machine."""

from pathlib import Path

import huggingface_hub

from splitinfer.core.layout import Layout
from splitinfer.core.plan import TensorSpec
from splitinfer.core.wire_codec import CODECS, MOST_WIDTH, bytes_per_row, packs
from splitinfer.demo import DEMO_MODELS
from splitinfer.doctor.advice import Codec, Hidden
from splitinfer.engine.links.codecs import seconds_per_row
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import read_config
from splitinfer.models.memory import on_gpu

USUAL = 4096  # values of a token, where the model is unknown


def hidden_of(layout: Layout) -> Hidden:
    """The hidden states of the layout's model if its configuration is on this machine; else a usual size."""
    dtype = _dtype(layout.dtype)
    values = None if layout.model is None else _values(layout.model)
    if values is None:
        return Hidden(USUAL, dtype, "assumed")
    return Hidden(values, dtype, str(layout.model))


def codecs_of(hidden: Hidden) -> list[Codec]:
    """The codecs that make such rows smaller, timed here; the other end is assumed to be as fast as this machine."""
    if hidden.values > MOST_WIDTH:
        return []
    row = TensorSpec(hidden.dtype, (hidden.values,))
    return [
        Codec(name, bytes_per_row(name, hidden.values, hidden.dtype), seconds_per_row(name, row))
        for name in CODECS
        if packs(name, hidden.values, hidden.dtype)
    ]


def _values(model: str) -> int | None:
    try:
        folder = _folder(model)
        config = None if folder is None else read_config(folder)
    except (ModelError, OSError, ValueError, RuntimeError):
        return None
    found = (config or {}).get("hidden_size") or ((config or {}).get("text_config") or {}).get("hidden_size")
    return found if isinstance(found, int) and found > 0 else None


def _folder(model: str) -> Path | None:
    """The folder of the model's configuration, if it is on this machine."""
    if model in DEMO_MODELS:
        return DEMO_MODELS[model]
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    found = huggingface_hub.try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _dtype(dtype: str) -> str:
    """On a CPU "auto" is float32; elsewhere it is the model's own, which is nearly always bfloat16."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if on_gpu() else "float32"
