"""A rank of plain mlx-lm's tensor parallel, and of a stage across two machines, side by side: `python -m
tests.matrix.halves RANK HOSTS FOLDER NAME...`

For each configuration both compute the same model's greedy answer; a line of JSON says what each got.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.halves import Pair, check_halves
from splitinfer.models.load.loader import count_layers, load_stage, survey

PROMPT = [(i * 37 + 11 + i * i) % 100 for i in range(24)]
NUM = 12


def mlx_lms(folder: Path, group: mx.distributed.Group) -> list[int]:
    model, _ = load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    model.shard(group)
    cache, tokens, found = make_prompt_cache(model), mx.array([PROMPT]), list[int]()
    for _ in range(NUM):
        found.append(int(mx.argmax(model(tokens, cache=cache)[0, -1]).item()))
        tokens = mx.array([[found[-1]]])
    return found


def ours(folder: Path, group: Pair) -> list[int]:
    checkpoint = open_folder(folder)
    whole = (0, count_layers(checkpoint))
    found = survey(checkpoint, *whole, "float32", group=group)
    stage = load_stage(checkpoint, found, *whole, "float32", lambda _done, _total: None, group=group)
    caches, tokens, answer = stage.make_caches(), mx.array([PROMPT]), list[int]()
    for _ in range(NUM):
        answer.append(int(mx.argmax(stage(tokens, caches, None, 1)[0, -1]).item()))
        tokens = mx.array([[answer[-1]]])
    return answer


def main(rank: int, hosts: str, folder: Path, names: list[str]) -> None:
    os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts}
    mx.set_default_device(mx.cpu)
    group = mx.distributed.init(strict=True, backend="ring")
    for name in names:
        where, said = folder / name.replace("/", "-"), dict[str, Any]()
        try:
            check_halves(open_folder(where))
            said = {"plain": mlx_lms(where, group), "ours": ours(where, Pair(rank, group))}
        except Exception as error:  # noqa: BLE001 - the same on both ranks, as all that is looked at
            said["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        print(json.dumps({"name": name, **said}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
