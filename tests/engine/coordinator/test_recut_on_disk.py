"""What is on disk is used after another cut where it covers the layers of every stage, and nowhere else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import stages

from splitinfer import SamplingParams
from splitinfer.engine.coordinator.requests import RequestOutput
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM, setup

BLOCK = 64
ALL = 3 * BLOCK - 1  # tokens of the prompt, but the one whose answer is to be computed


def ask(llm: LLM) -> RequestOutput:
    return llm.generate([stages.prompt(3 * BLOCK)], SamplingParams(max_tokens=8, ignore_eos=True))[0]


@pytest.mark.parametrize("shares", [False, True], ids=["a folder each", "one folder"])
def test_kv_on_disk_after_another_cut(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
):
    stages.shorten_blocks(monkeypatch, BLOCK)
    monkeypatch.setattr(setup, "WORTH", 1)
    disks = [Disk(tmp_path / ("both" if shares else name), 10**9) for name in "ab"]
    with stages.pipeline(tiny_folder("llama"), [2, 2], disks=disks, token_budget=BLOCK) as llm:
        first = ask(llm)
        assert first.num_cached_tokens == 0
        llm.recut([1, 3])
        other = ask(llm)
        assert other.token_ids == first.token_ids
        assert other.num_cached_tokens == (ALL if shares else 0), "files of 0-2 and 2-4 cover 1-4; those of 2-4 do not"
        llm.recut([2, 2])
        again = ask(llm)
        assert (again.num_cached_tokens, again.token_ids) == (ALL, first.token_ids)
        llm.recut([1, 3])
        third = ask(llm)
        assert (third.num_cached_tokens, third.token_ids) == (ALL, first.token_ids)
