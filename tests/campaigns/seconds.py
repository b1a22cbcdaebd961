"""How long a plan takes: seconds of measuring, of planning, and of all of it, with workers in processes of their own.

    python -m tests.campaigns.seconds                                    66 layers, 4 bits, on this machine's processor
    python -m tests.campaigns.seconds --layers 66 --hidden 5120 --intermediate 17408 --draft demo-draft
    python -m tests.campaigns.seconds --start                            LLM(model, workers) as well, with a small model

The model has shapes and no numbers: its file of weights is a hole of the right size, and machines make the numbers up.
The workers share this machine, so measuring is spread over fewer processors than where each has its own; processor
seconds of this process are printed beside. ``again`` is the second plan, in which every machine remembers what it was
measured to do. With ``--start`` a pipeline of a small model is started twice from nothing but workers. Nothing else may
run on the machine meanwhile.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from processes import worker

from splitinfer.bench.shared.random_model import Shape as ModelShape
from splitinfer.bench.shared.random_model import make
from splitinfer.llm import LLM, Settings
from splitinfer.llm.automatic import ACCEPTANCE, as_workers, measured_profiles
from splitinfer.placement.asked import Asked
from splitinfer.placement.plan import plan

_DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32", mx.uint8: "U8"}


def main() -> None:
    """Print a line of JSON for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 66), ("hidden", 2048), ("intermediate", 6144), ("vocab", 151_936), ("bits", 4), ("workers", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--start", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "caches")  # nothing is remembered from before
        model = write_shapes(Path(folder) / "model", asked)
        _tell("machine", {"loads": os.getloadavg(), **vars(asked)})
        for when in ("first", "again"):
            _plan(when, model, asked)
        if asked.start:
            _start(Path(folder) / "small", asked)


def _plan(when: str, model: Path, asked: argparse.Namespace) -> None:
    with workers(asked.workers) as addresses:
        began = _now()
        settings = Settings(draft=asked.draft, connect_timeout=60)
        profiles = measured_profiles(str(model), as_workers(addresses), settings, lambda _name, _progress: None)
        measured = _now()
        acceptance = None if profiles.model.draft is None else ACCEPTANCE
        found = plan(profiles, Asked(acceptance=acceptance))
        ended = _now()
    _tell(when, {
        "measuring": _between(began, measured), "planning": _between(measured, ended),
        "whole": _between(began, ended), "cuts": {str(aim): best.cut.name for aim, best in found.best.items()},
        "simulated": found.simulated,
    })  # fmt: skip


def _start(folder: Path, asked: argparse.Namespace) -> None:
    """Start a pipeline of a small model of as many layers, twice, with new workers each time."""
    make(folder, ModelShape(layers=asked.layers, hidden=128, heads=4, kv_heads=2, mlp=256, vocab=512))
    for when in ("start", "start again"):
        with workers(asked.workers) as addresses:
            began = _now()
            with LLM(model=str(folder), workers=addresses):
                _tell(when, {"whole": _between(began, _now())})


@contextmanager
def workers(count: int) -> Iterator[list[str]]:
    """Addresses of workers in processes of their own, at addresses of the loopback that count as machines of their own:
    such are measured at the same time. Each remembers what it was measured to do in a folder of its own."""
    caches = Path(os.environ["XDG_CACHE_HOME"])
    with ExitStack() as stack:
        ports = [
            stack.enter_context(
                worker("--host", f"127.0.0.{i + 1}", env={"XDG_CACHE_HOME": f"{caches}-{i}"})
            ).address.rpartition(":")[2]
            for i in range(1, count + 1)
        ]
        yield [f"w{i}=tcp://127.0.0.{i + 1}:{port}" for i, port in enumerate(ports, 1)]


def write_shapes(folder: Path, asked: argparse.Namespace) -> Path:
    """A folder of a Qwen3 of these sizes, whose file of weights has a header and a hole."""
    config: dict[str, Any] = {
        "model_type": "qwen3", "hidden_size": asked.hidden, "intermediate_size": asked.intermediate,
        "vocab_size": asked.vocab, "num_hidden_layers": asked.layers, "num_attention_heads": asked.hidden // 128,
        "num_key_value_heads": max(1, asked.hidden // 512), "head_dim": 128, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "max_position_embeddings": 40960, "rope_theta": 1e6,
    }  # fmt: skip
    model_class, args_class = _get_classes(config)
    model: nn.Module = model_class(args_class.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if asked.bits:
        nn.quantize(model, group_size=64, bits=asked.bits)
        config["quantization"] = {"group_size": 64, "bits": asked.bits}
    entries, end = dict[str, Any](), 0
    for name, array in tree_flatten(model.parameters()):
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": _DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return folder


def _now() -> tuple[float, float]:
    return time.monotonic(), sum(os.times()[:2])


def _between(began: tuple[float, float], ended: tuple[float, float]) -> dict[str, float]:
    """Seconds, and this process's own on a processor."""
    return {"seconds": round(ended[0] - began[0], 1), "of_processor": round(ended[1] - began[1], 1)}


def _tell(what: str, figures: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"what": what, **figures}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
