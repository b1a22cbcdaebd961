"""An Engram table in memory and on disk: memory held, the time of a prompt and of a token.

    python -m tests.campaigns.tables_on_disk
    python -m tests.campaigns.tables_on_disk --gigabytes 16 --tokens 64

A random DeepSeek-V4.1 of 6 small layers with one table of random numbers, run by plain calls of one stage; each way is
a process of its own, the same tokens. *cold*: the table's file is in no cache of the operating system's (what the
process itself has read since is); *warm*: the same tokens once more. Exit code 1: the two ways' logits differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

HEAD, HEADS, NGRAMS, VOCAB, HIDDEN = 256, 4, 2, 512, 256
_WAYS = {"memory": 2**62, "disk": 2**27}  # bytes from which on a table stays on disk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help="used by the program itself")
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(_one(*given.one, given)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tables-") as folder:
        _make(Path(folder), given.gigabytes)
        same = ["--prompt", str(given.prompt), "--tokens", str(given.tokens)]
        found = {}
        for way in _WAYS:
            command = [sys.executable, "-m", "tests.campaigns.tables_on_disk", *same, "--one", way, folder]
            found[way] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            figures = ", ".join(f"{name} {value:.4g}" for name, value in found[way].items() if name != "logits")
            print(f"{way}: {figures}")
    return int(found["memory"]["logits"] != found["disk"]["logits"])


def _make(folder: Path, gigabytes: float) -> None:
    """Write the model; its table chunk by chunk."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from splitinfer.models import mlx_vlm

    base = int(gigabytes * 2**30 / (2 * HEAD * HEADS * NGRAMS))
    config: dict[str, Any] = {
        "model_type": "deepseek_v41", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16,
        "o_groups": 2, "o_lora_rank": 32, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "hc_mult": 2, "hc_sinkhorn_iters": 2, "rms_norm_eps": 1e-6, "compress_ratios": [0, 2, 2, 0, 1, 1],
        "kv_source_layer_ids": [1, 4], "index_source_layer_ids": [1, 4], "index_n_heads": 2, "index_head_dim": 32,
        "index_topk": 64, "candidate_source_layer_id": 4, "engram_layer_ids": [1], "engram_head_dim": HEAD,
        "engram_num_embeddings": [0], "engram_max_ngram_size": NGRAMS + 1, "engram_vocab_size": base,
        "engram_n_heads": HEADS, "engram_compressed_vocab_size": VOCAB, "vision_num_layers": 1,
        "vision_hidden_size": 16, "vision_num_heads": 2, "vision_intermediate_size": 32,
    }  # fmt: skip
    package, _ = mlx_vlm.module("utils").get_model_and_args(config)
    layout = mlx_vlm.module("models.deepseek_v41.engram").EngramLayout.from_config(
        package.ModelConfig.from_dict(config)
    )
    rows = config["engram_num_embeddings"][0] = sum(prime for per_size in layout.primes[0] for prime in per_size)
    model = package.Model(package.ModelConfig.from_dict(config)).language_model
    table = "language_model.layers.1.engram.embed.weight"
    weights = {f"language_model.{name}": array for name, array in tree_flatten(model.parameters())}
    weights = {
        name: mx.random.normal(a.shape) * 0.1 if a.ndim > 1 else a for name, a in weights.items() if name != table
    }
    weights |= {f"image_{part}": mx.zeros((HIDDEN,)) for part in ("start", "end", "newline")}
    mx.save_safetensors(str(folder / "model-1.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "engram_token_map.json").write_text(json.dumps(list(range(VOCAB))))
    _write_table(folder / "model-2.safetensors", table, rows)


def _write_table(path: Path, name: str, rows: int) -> None:
    entry = {name: {"dtype": "BF16", "shape": [rows, HEAD], "data_offsets": [0, 2 * rows * HEAD]}}
    header, random = json.dumps(entry).encode(), np.random.default_rng(0)
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, rows, 2**17):
            bits = random.integers(0, 2**16, (min(2**17, rows - start), HEAD), np.uint16)
            file.write((bits & 0x807F | 0x3F00).tobytes())  # 0.5 to 1 and -1 to -0.5
        file.flush()
        os.fsync(file.fileno())


def _one(way: str, folder: str, given: argparse.Namespace) -> dict[str, Any]:
    """Load and run the model in one way."""
    import mlx.core as mx

    from splitinfer.models import loader, tables
    from splitinfer.models.checkpoint import open_folder

    tables.LARGE = _WAYS[way]
    loader._LONG = (64, 512)
    checkpoint = open_folder(Path(folder))
    found = loader.survey(checkpoint, 0, 6, None)
    began = time.perf_counter()
    stage = loader.load_stage(checkpoint, found, 0, 6, None, lambda *_: None)
    loading = time.perf_counter() - began
    with (Path(folder) / "model-2.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    figures: dict[str, Any] = {"needed_MB": found.need.weights / 2**20, "load_s": loading}
    tokens = np.random.default_rng(1).integers(0, VOCAB, (1, given.prompt + given.tokens)).astype(np.int32)
    for state in ("cold", "warm"):
        caches, at = stage.make_caches(), [0, *range(given.prompt, tokens.shape[1] + 1)]
        seconds = []
        for start, end in pairwise(at):
            began = time.perf_counter()
            logits = stage(mx.array(tokens[:, start:end]), caches, None, 1)
            mx.eval(logits, caches.arrays())
            seconds.append(time.perf_counter() - began)
        figures[f"{state}_prompt_ms"] = 1e3 * seconds[0]
        figures[f"{state}_token_ms"] = 1e3 * float(np.median(seconds[1:]))
        figures[f"{state}_tokens_s"] = given.tokens / sum(seconds[1:])
    memory = psutil.Process().memory_full_info()
    figures |= {"own_MB": memory.uss / 2**20, "mapped_MB": memory.shared / 2**20}
    return {**figures, "logits": np.array(logits.astype(mx.float32))[0, 0, :8].tolist()}


if __name__ == "__main__":
    raise SystemExit(main())
