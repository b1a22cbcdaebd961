#!/usr/bin/env bash
# mlx-vlm 0.7.10, PipelineMixin: with 43 layers (DeepSeek-V4-Flash) on two ranks, layer 21 is on neither. The first layer of
# a rank is counted by its own number of layers, although the ranks before it have one less.
source "$(dirname "$0")/_python" --no-deps mlx-vlm==0.7.10
"$folder/bin/python" - <<'PYTHON'
import runpy, sys
from pathlib import Path

at = next(Path(sys.prefix).rglob("mlx_vlm/models/pipeline.py"))  # by itself: the package would import all of MLX
PipelineMixin = runpy.run_path(str(at))["PipelineMixin"]


class Group:
    def __init__(self, rank): self._rank = rank
    def rank(self): return self._rank
    def size(self): return 2


def layers_of(rank, count):
    model = PipelineMixin()
    model.layers = list(range(count))
    model.pipeline(Group(rank))
    return model.pipeline_layers


missing = {count: sorted(set(range(count)) - {*layers_of(0, count), *layers_of(1, count)}) for count in (42, 43)}
print(f"expected: no layer is missing, of 42 and of 43\nseen:     {missing}")
sys.exit(missing != {42: [], 43: [21]})
PYTHON
