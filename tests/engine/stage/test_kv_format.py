"""KV in few bits: other tokens than exact KV may give, but the same ones on every road."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from engine import door
from engine.door import SEVERAL, Open, ask
from tiny import Folder

from splitinfer.errors import ModelError
from splitinfer.kvstore.store import Disk

NIGHTLY = pytest.mark.nightly
HEADS = {"llama": 64, "qwen3": 32, "qwen3_moe": 64, "gemma3_text": 32, "gpt_oss": 64, "qwen3_next": 32}
ROADS = product(HEADS, ["k8v8", "k8v4"], [([4], 512), ([1, 3], 7), ([1, 2, 1], 1)])


@pytest.mark.parametrize(("name", "kv_format", "road"), [
    ("llama", "k8v4", ([1, 3], 7)), pytest.param("gemma3_text", "k8v8", ([1, 2, 1], 16), marks=NIGHTLY),
    *(pytest.param(*one, marks=NIGHTLY) for one in ROADS if one[:2] != ("gpt_oss", "k8v4")),  # refused by its trial
], ids=str)  # fmt: skip
def test_every_road_gives_the_same(
    name: str, kv_format: str, road: tuple[list[int], int], tiny_folder: Folder, pipeline: Open
) -> None:
    """Windows and states stay as they are, and so does the dtype of keys and values in half precision."""
    folder, (cuts, budget) = tiny_folder(name, head_dim=HEADS[name]), road
    cuts = [*cuts[:-1], cuts[-1] + door.num_layers(folder) - 4]
    with pipeline(folder, cuts, kv_format=kv_format, token_budget=budget) as there:
        for one in SEVERAL[1:]:
            there.answers(replace(one, tokens=(*one.tokens, *SEVERAL[1].tokens * 3)))


@pytest.mark.parametrize("kv_format", ["k8v8", pytest.param("k8v4", marks=NIGHTLY)])
def test_kept_in_memory_and_on_disk(kv_format: str, tiny_folder: Folder, tmp_path: Path, pipeline: Open) -> None:
    folder, disks = tiny_folder("llama", head_dim=64), [Disk(tmp_path / name, 10**9) for name in "ab"]
    one, cached, sizes = ask(70, temperature=0.8), [], []
    for used in (kv_format, kv_format, "exact"):
        with pipeline(folder, [2, 2], block=16, disks=disks, kv_format=used) as there:
            cached += [there.outputs(one)[0].num_cached_tokens for _ in range(2)]
            sizes.append(sum(stage["kv_bytes_per_token"] for stage in there.stats["stages"]))
    assert sizes[0] == pytest.approx(sizes[2] * (0.2813 if kv_format == "k8v8" else 0.2188), rel=1e-3)
    assert (cached[0], cached[2], cached[4]) == (0, 69, 0), "found by the next, and not in another format"
    assert cached[1] >= 64


@pytest.mark.parametrize(("name", "changes", "kv_format", "error", "sentence"), [
    ("deepseek_v3", {}, "k8v8", ModelError, "deepseek_v3 cannot be k8v8: "),
    ("llama", {"head_dim": 16}, "k8v8", ModelError, "its heads have 16 numbers, and 32 does not divide that"),
    ("llama", {}, "k2", ValueError, "kv_format must be one of exact, k8v8, k8v4, not 'k2'"),
])  # fmt: skip
def test_what_cannot_be_quantised_is_refused(
    name: str,
    changes: dict[str, int],
    kv_format: str,
    error: type[Exception],
    sentence: str,
    tiny_folder: Folder,
    pipeline: Open,
) -> None:
    with pytest.raises(error, match=sentence), pipeline(tiny_folder(name, **changes), [4], kv_format=kv_format):
        pass
