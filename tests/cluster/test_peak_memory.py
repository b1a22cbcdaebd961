"""What each stage's process holds at its peak: its own weights as loaded, and little more. The other's never.

Measured on real processes with a model large enough to tell: loading, a prompt, an answer.
"""

import json
import re
import sys
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
import tiny
from effort import long
from mlx.utils import tree_flatten
from processes import Running, are_gone, figure, until, worker, write_layout

MIB = 2**20
MARGIN = (
    180 * MIB
)  # the interpreter, MLX and activations: less than the other stage's weights, so that those would show
LAYERS = 8
NUM_TOKENS = 32  # of the prompt; each takes the reference BLAS a sixth of a second
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": LAYERS, "vocab_size": 4096}
COORDINATOR = f"""
import json, sys
import splitinfer
layout, = sys.argv[1:]
with splitinfer.LLM(layout) as llm:
    prompt = [i % 97 for i in range({NUM_TOKENS})]
    out, = llm.generate([prompt], splitinfer.SamplingParams(max_tokens=4, ignore_eos=True))
    print(json.dumps([stage["weight_bytes"] for stage in llm.stats()["stages"]]), flush=True)
    sys.stdin.read()
"""


def peak(process: psutil.Process) -> int:
    """The most memory a process has had resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model, with its weights in two dtypes. What they are is of no importance here, so all are equal."""
    model, config = tiny.build("llama", **SHAPE)  # whose random numbers nobody reads, so that none is drawn
    found = {}
    for dtype in ("float32", "bfloat16"):
        folder = found[dtype] = tmp_path_factory.mktemp(dtype)
        (folder / "config.json").write_text(json.dumps(config))
        weights = {
            name: mx.full(array.shape, 0.01, getattr(mx, dtype)) for name, array in tree_flatten(model.parameters())
        }
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", long("float32")])
def test_a_stage_holds_its_own_weights_only(dtype: str, folders: dict[str, Path], tmp_path: Path):
    """On the CPU weights become float32 whatever the file has, so the files' dtype changes how they are read."""
    folder = folders[dtype]
    whole = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * (1 if dtype == "float32" else 2)
    with worker() as remote:
        address = remote.address
        empty = peak(remote.process)
        layout = write_layout(tmp_path, [address], str(folder), layers=LAYERS)
        coordinator = Running(str(layout), code=COORDINATOR)
        try:
            weights = json.loads(coordinator.prints(r"\[.*\]", 60)[0])
            peaks = [peak(coordinator.process), peak(remote.process)]
        finally:
            coordinator.end()
        until(lambda: are_gone([coordinator.process]), "it is gone", 5)
    figures = [
        f"{name}: weights {own / MIB:.0f} MiB, peak {high / MIB:.0f} MiB, over {(high - own) / MIB:.0f} MiB"
        for name, own, high in zip(("coordinator", "worker"), weights, peaks, strict=True)
    ]
    figure(
        f"{dtype} files, whole model {whole / MIB:.0f} MiB, empty worker {empty / MIB:.0f} MiB; {'; '.join(figures)}"
    )
    for own, high in zip(weights, peaks, strict=True):
        assert whole - own > MARGIN, "the model is too small to tell"
        assert high < own + MARGIN
