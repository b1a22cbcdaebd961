"""What each stage's process holds at its peak: its own weights as loaded, and little more. The other's never.

Measured on real processes with a model large enough to tell: loading, a prompt, an answer.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
import tiny
from mlx.utils import tree_flatten
from processes import Running, local_workers, write_layout

MIB = 2**20
MARGIN = 180 * MIB  # the interpreter, MLX and activations; the other stage's weights are more, and would show
LAYERS = 8
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": LAYERS, "vocab_size": 4096}
COORDINATOR = """
import json, sys
import splitinfer
layout, = sys.argv[1:]
with splitinfer.LLM(layout) as llm:
    llm.generate([[*range(32)]], splitinfer.SamplingParams(max_tokens=4, ignore_eos=True))
    print(json.dumps([stage["weight_bytes"] for stage in llm.stats()["stages"]]), flush=True)
    sys.stdin.read()
"""


@contextmanager
def answering(layout: Path) -> Iterator[tuple[Running, list[int]]]:
    """A coordinator that has answered, and the bytes of weights that each stage says it holds."""
    with Running(str(layout), code=COORDINATOR) as coordinator:
        yield coordinator, json.loads(coordinator.prints(r"\[.*\]", 60)[0])


def peak(process: psutil.Process) -> int:
    """The most memory a process has had resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def save(folder: Path, dtype: str) -> Path:
    """A model whose weights are all equal: what they are is of no importance here."""
    model, config = tiny.build("llama", **SHAPE)  # whose random numbers nobody reads, so that none is drawn
    (folder / "config.json").write_text(json.dumps(config))
    parameters = tree_flatten(model.parameters())
    weights = {name: mx.full(array.shape, 0.01, getattr(mx, dtype)) for name, array in parameters}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
@pytest.mark.parametrize("is_divided", [False, True], ids=["its own layers", "its half of each layer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_process_holds_its_own_weights_only(dtype: str, is_divided: bool, tmp_path: Path):
    """On the CPU weights become float32 whatever the file has, so the files' dtype changes how they are read. Of a
    stage across two processes each tensor is read, cut and dropped."""
    folder = save(tmp_path, dtype)
    whole = (folder / "model.safetensors").stat().st_size * (1 if dtype == "float32" else 2)
    layout = write_layout(tmp_path, ["local"], str(folder), layers=LAYERS)
    if is_divided:
        stages = [{"name": "both", "layers": LAYERS, "across": ["local", "local"]}]
        layout.write_text(json.dumps({"model": str(folder), "stages": stages}))
    with answering(layout) as (coordinator, weights):
        workers = [peak(one) for one in local_workers(psutil.Process(coordinator.pid)).values()]
        peaks = workers if is_divided else [peak(coordinator.process), *workers]
    assert len(peaks) == 2
    for own, high in zip(weights * (2 if is_divided else 1), peaks, strict=True):
        assert own < 0.6 * whole  # of a half, the embedding and the head are whole
        assert high < own + MARGIN < whole
