"""A request that gives its KV up to others has it written to disk, and goes on from there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from stages import pipeline, prompt, shorten_blocks

import splitinfer
from splitinfer.kvstore.store import Disk
from splitinfer.models import kv_blocks

BLOCK = 16


@pytest.mark.parametrize("kv_format", ["exact", "k8v4"])
def test_what_is_given_up_is_read_again(
    kv_format: str, tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for one long answer and a part of another: the younger one waits, and is not computed again."""
    shorten_blocks(monkeypatch, BLOCK)
    monkeypatch.setattr(kv_blocks, "_ROOM", BLOCK)  # what a kept block is counted with
    folder = tiny_folder("llama", head_dim=64)
    prompts, lengths = [prompt(60, seed=1), prompt(8, seed=2)], [100, 75]
    params = [
        splitinfer.SamplingParams(max_tokens=n, temperature=0.8, seed=n, ignore_eos=True) for n in lengths
    ]  # fmt: skip
    with pipeline(folder, [2, 2], kv_format=kv_format) as llm:
        alone = [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
        per_token = max(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])
    disks = [Disk(tmp_path / name, 10**9) for name in "ab"]
    with pipeline(folder, [2, 2], kv_format=kv_format, disks=disks, kv_bytes=11 * BLOCK * per_token) as llm:
        assert [out.token_ids for out in llm.generate(prompts, params)] == alone
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert stats["swapped_tokens"] > 0
        assert stats["fetched_tokens"] > 0
        assert stats["read_seconds_per_token"] > 0
