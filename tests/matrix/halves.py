"""A rank of every class's stage across two machines, beside the whole model: `python -m tests.matrix.halves RANK HOSTS
FOLDER NUM NAME...`

A line of JSON says for each configuration what NUM greedy tokens the whole model, the halves, and plain mlx-lm's tensor
parallel get (where mlx-lm has it), what a rank holds of the layers, and how many sums a token takes.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import compare
import mlx.core as mx
import mlx.nn as nn
import vlm_configs
from configs import architecture
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.divided import _shards_little, divide
from splitinfer.models.cut.pretended import PretendedRank, alone
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.library import mlx_vlm
from splitinfer.models.library.layers import find_layers
from splitinfer.models.load.halves import Pair
from splitinfer.models.load.loader import count_layers, load_stage, survey

PROMPT = [(i * 37 + 11 + i * i) % 100 for i in range(24)]
VLM = "vlm "


def is_mlx_lms(name: str) -> bool:
    """Whether mlx-lm has ``shard`` for a configuration."""
    module = None if name.startswith(VLM) else import_module(f"mlx_lm.models.{architecture(name)}")
    return hasattr(getattr(module, "Model", None), "shard")


def mlx_lms(folder: Path, group: mx.distributed.Group, num: int) -> list[int]:
    model, _ = load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    model.shard(group)
    cache = make_prompt_cache(model)
    return greedy(lambda tokens: model(tokens, cache=cache), num)


def greedy(logits: Callable[[mx.array], mx.array], num: int) -> list[int]:
    tokens, found = mx.array([PROMPT]), list[int]()
    for _ in range(num):
        found.append(int(mx.argmax(logits(tokens)[0, -1]).item()))
        tokens = mx.array([[found[-1]]])
    return found


def loaded(folder: Path, group: Pair | None) -> StageModel:
    checkpoint = open_folder(folder)
    whole = (0, count_layers(checkpoint))
    found = survey(checkpoint, *whole, "float32", group=group)
    return load_stage(checkpoint, found, *whole, "float32", lambda _done, _total: None, group=group)


def built(name: str, group: Any) -> StageModel:
    """A stage of mlx-vlm's class, whose numbers a seed makes on both ranks."""
    model = compare.build(vlm_configs.CONFIGS[name.removeprefix(VLM)], make=compare.mlx_vlms)
    mlx_vlm.without_detours(model)
    stage = StageModel(model, 0, len(find_layers(model)))
    if group is not None:
        divide(model, group)
    return stage


def answer(stage: StageModel, num: int) -> list[int]:
    caches = stage.make_caches()
    return greedy(lambda tokens: stage(tokens, caches, None, 1), num)


def size(model: nn.Module) -> int:
    return sum(array.nbytes for slot in find_layers(model) for _, array in tree_flatten(slot.layer.parameters()))


def main(rank: int, hosts: str, folder: Path, num: int, names: list[str]) -> None:
    os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts}
    mx.set_default_device(mx.cpu)
    group = mx.distributed.init(strict=True, backend="ring")
    for name in names:
        where, said = folder / name.replace("/", "-"), dict[str, Any]()
        try:
            is_built = name.startswith(VLM)
            whole = built(name, None) if is_built else loaded(where, None)
            said = {"whole": answer(whole, num)}
            pretended = built(name, PretendedRank()) if is_built else None
            half = built(name, group) if is_built else loaded(where, Pair(rank, group))
            said |= {"share": round(size(half.whole) / size(whole.whole), 3), "ours": answer(half, num)}
            if pretended is not None:
                with alone() as sums:
                    pretended(mx.zeros((1, 1), mx.int32), pretended.make_caches(), None, 1)
                said |= {"sums": len(sums), "bytes": max(sums), "layers": pretended.num_layers}
            if is_mlx_lms(name):
                said["plain"] = mlx_lms(where, group, num)
            is_shards = hasattr(whole.whole, "shard") and not _shards_little(whole.whole, 0)
            said["by"] = "shard" if is_shards else "inspection"
        except Exception as error:  # noqa: BLE001 - the same on both ranks, as all that is looked at
            said["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        print(json.dumps({"name": name, **said}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
