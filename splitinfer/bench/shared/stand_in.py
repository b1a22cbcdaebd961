"""A stand-in for a large model: small enough that a processor computes its steps in less time than an emulated
accelerator takes for the large one's. Two layers for each stage, 32 numbers wide, with a long context; and one head,
because what takes a processor longest is a chunk's attention to thousands of positions, once for each head.
"""

import json
from pathlib import Path

from splitinfer.bench.shared.random_model import Shape, make
from splitinfer.places import caches

_LAYERS = 2  # of each stage
_VOCABULARY = 512


def stand_in_layout(num_stages: int, vocab: int = _VOCABULARY) -> Path:
    """A layout of ``num_stages`` stages on this machine for a stand-in model, which is made when it is first needed.
    ``vocab``: tokens that the model has."""
    folder = caches() / "bench"
    shape = Shape(layers=_LAYERS * num_stages, hidden=32, heads=1, kv_heads=1, mlp=64, vocab=vocab)
    kind = "" if vocab == _VOCABULARY else f"-of-{vocab}"
    model = folder / f"stand-in-{shape.layers}-layers{kind}"
    if not (model / "config.json").exists():
        make(model, shape, num_files=1)
    stages = [
        {"name": f"stage{i}", "layers": _LAYERS, **({} if i == 0 else {"address": "local"})} for i in range(num_stages)
    ]
    layout = folder / f"stand-in-{num_stages}-stages{kind}.yaml"
    layout.write_text(json.dumps({"model": str(model), "stages": stages}), encoding="utf-8")  # JSON is YAML
    return layout
