"""Which of mlx-lm's classes divide over two ranks: all that have ``shard``, but where a count is odd."""

import mlx.core as mx
import pytest
from compare import build
from configs import configurations

from splitinfer.errors import ModelError
from splitinfer.models.divided import PretendedRank, alone, divide

_ODD = {"prism_hadamard_qwen35", "step3p5"}  # the first has quantised weights in a class of its own; one KV head


@pytest.mark.nightly
def test_every_class_with_shard_divides():
    models = {name: build(config) for name, config in sorted(configurations().items())}
    able = {name: model for name, model in models.items() if hasattr(model, "shard")}
    assert len(able) > 24
    for name, model in able.items():
        if name in _ODD:
            with pytest.raises(ModelError, match="cannot be divided by 2 ranks"):
                divide(model, PretendedRank())
            continue
        divide(model, PretendedRank())
        with alone() as sums:
            mx.eval(model(mx.zeros((1, 3), mx.int32)))
        assert len(sums) >= 2 * len(model.layers), name
