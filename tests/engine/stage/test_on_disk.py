"""KV that was written to disk gives the tokens it gives cold, and whatever happened to the files gives them, too."""

import contextlib
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from effort import long, thorough
from stages import layout, pipeline, prompt, shorten_blocks, worker

from splitinfer.core.scheduler.admission import AdmissionControl
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.coordinator.requests import RequestOutput
from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM, Settings, setup
from splitinfer.models.kv_pool import KVPool

BLOCK = 64  # WindowKVCache keeps positions aligned to this
KINDS = ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next"]
LONG = 10**9  # bytes


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_blocks(monkeypatch, BLOCK)
    monkeypatch.setattr(setup, "WORTH", 1)


@pytest.fixture(autouse=True)
def reading_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether KV is read or computed again follows from measured times: on a busy machine a tiny model is computed
    faster than its first block was read, and the next one is not read."""
    monkeypatch.setattr(AdmissionControl, "reads_faster", lambda _self, _num_tokens: True)


@contextlib.contextmanager
def served(folder: Path, cuts: Sequence[int], paths: Sequence[Path], cap: int = LONG, **more: Any) -> Iterator[LLM]:
    """Stages that keep KV at ``paths``; what is still to be written when they end is written."""
    disks = [Disk(path, cap) for path in paths]
    with pipeline(folder, cuts, disks=disks, token_budget=BLOCK, **more) as llm:
        yield llm


def cold(folder: Path, cuts: Sequence[int], asked: Sequence[list[int]], **params: Any) -> list[list[int]]:
    with pipeline(folder, cuts, prefix_cache=False, token_budget=BLOCK) as llm:
        return [ask(llm, tokens, **params).token_ids for tokens in asked]


def ask(llm: LLM, tokens: list[int], **params: Any) -> RequestOutput:
    return llm.generate([tokens], SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params}))[0]


@dataclass(frozen=True)
class DiskBlock:
    """What two stages of a model wrote of one prompt; each has a folder of its own. ``right``: what was answered."""

    folder: Path
    first: list[int]
    paths: list[Path]
    right: list[int]


@pytest.fixture(scope="module")
def written() -> dict[str, DiskBlock]:
    """What ``kept`` gives copies of."""
    return {}


@pytest.fixture
def kept(
    written: dict[str, DiskBlock],
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> DiskBlock:
    """KV of 200 tokens on the disks of two stages that have ended; this test may do to it what it likes."""
    if not written:
        folder, first, made = tiny_folder("llama"), prompt(200), tmp_path_factory.mktemp("kept")
        paths = [made / "0", made / "1"]
        with served(folder, [2, 2], paths) as llm:
            written["llama"] = DiskBlock(folder, first, paths, ask(llm, first).token_ids)
    one = written["llama"]
    return replace(one, paths=[shutil.copytree(path, tmp_path / path.name) for path in one.paths])


def cuts_of(folder: Path, num_stages: int = 2) -> list[int]:
    num_layers = int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    return [num_layers - num_stages + 1, *[1] * (num_stages - 1)]


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


@pytest.mark.parametrize(("kind", "num_stages"), [*((kind, 2) for kind in KINDS), ("llama", 3), ("llama", 1)])
def test_after_all_were_restarted_the_next_turn_gets_the_tokens_it_gets_cold(
    tiny_folder: Callable[..., Path], tmp_path: Path, kind: str, num_stages: int
):
    folder = tiny_folder(kind)
    cuts, paths = cuts_of(folder, num_stages), [tmp_path / str(i) for i in range(num_stages)]
    asked = [(prompt(150), {}), (prompt(170, seed=4), {"temperature": 0.8, "seed": 3})]
    with served(folder, cuts, paths) as llm:
        said = [[*first, *ask(llm, first, **params).token_ids] for first, params in asked]
    turns = [[*before, *prompt(9, seed=5)] for before in said]
    with served(folder, cuts, paths) as llm:
        hits = [ask(llm, turn, **params) for turn, (_, params) in zip(turns, asked, strict=True)]
        assert [hit.num_cached_tokens for hit in hits] == [len(before) - 1 for before in said]
        assert llm.stats()["computed_tokens"] == sum(
            len(turn) - hit.num_cached_tokens + len(hit.token_ids) - 1 for turn, hit in zip(turns, hits, strict=True)
        )
    with pipeline(folder, cuts, prefix_cache=False, token_budget=BLOCK) as llm:
        for turn, hit, (_, params) in zip(turns, hits, asked, strict=True):
            assert ask(llm, turn, **params).token_ids == hit.token_ids


def test_an_edited_turn_reuses_up_to_the_edit(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder, first, paths = tiny_folder("llama"), prompt(150), [tmp_path, tmp_path]
    with served(folder, [2, 2], paths) as llm:
        ask(llm, first)
    edited = [*first[:140], *prompt(9, seed=5)]
    with served(folder, [2, 2], paths) as llm:
        hit = ask(llm, edited)
        assert hit.num_cached_tokens == 140
    assert cold(folder, [2, 2], [edited]) == [hit.token_ids]


@pytest.mark.parametrize("lost", [0, 1])
def test_what_one_stage_has_lost_is_computed_again_and_kept_again(
    tiny_folder: Callable[..., Path], tmp_path: Path, lost: int
):
    folder, first, paths = tiny_folder("llama"), prompt(200), [tmp_path / "0", tmp_path / "1"]
    with served(folder, [2, 2], paths) as llm:
        right = ask(llm, first).token_ids
        for path in files(paths[lost]):  # under the eyes of the stage, which thinks that they are there
            path.unlink()
    cached = []
    for _ in range(2):
        with served(folder, [2, 2], paths) as llm:
            out = ask(llm, first)
            assert out.token_ids == right
            cached.append(out.num_cached_tokens)
    assert cached == [0, len(first) - 1]


@pytest.mark.parametrize("lost", [0, 1])
def test_what_goes_while_the_pipeline_is_up_is_computed_again(kept: DiskBlock, lost: int):
    """The coordinator believes that every stage has the blocks, and hears only when it asks for them."""
    with served(kept.folder, [2, 2], kept.paths) as llm:
        there = files(kept.paths[lost])
        for path in there[len(there) // 2 :]:
            path.unlink()
        assert ask(llm, kept.first).token_ids == kept.right
        assert ask(llm, kept.first).num_cached_tokens == len(kept.first) - 1


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_anywhere_changes_no_token(kept: DiskBlock, seed: int):
    pick = random.Random(seed)
    path = pick.choice([file for one in kept.paths for file in files(one)])
    data = bytearray(path.read_bytes())
    data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    path.write_bytes(data)
    with served(kept.folder, [2, 2], kept.paths) as llm:
        out = ask(llm, kept.first)
        assert out.token_ids == kept.right
        assert out.num_cached_tokens % BLOCK == 0  # up to the damaged block
    assert not path.exists() or bytes(data) != path.read_bytes()


def test_a_stage_that_evicts_on_its_own_costs_time_and_no_token(tiny_folder: Callable[..., Path], tmp_path: Path):
    """The first stage's disk holds all, the second's two prompts or so; the coordinator learns of it by asking."""
    folder, params = tiny_folder("llama"), SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [prompt(150, seed=i) for i in range(5)]
    with served(folder, [2, 2], [tmp_path / "whole"] * 2) as llm:
        right = [llm.generate([one], params)[0].token_ids for one in prompts]
    one_prompt = sum(path.stat().st_size for path in files(tmp_path)) // (2 * len(prompts))
    disks = [Disk(tmp_path / "0", LONG), Disk(tmp_path / "1", int(2.5 * one_prompt))]
    cached = []
    for _ in range(3):
        with pipeline(folder, [2, 2], disks=disks, token_budget=BLOCK) as llm:
            outs = [ask(llm, one) for one in prompts]
            assert [out.token_ids for out in outs] == right
            cached.append(sum(out.num_cached_tokens for out in outs))
    assert len(files(tmp_path / "1")) < len(files(tmp_path / "0"))
    assert max(cached) < sum(map(len, prompts)) / 2


def test_other_cuts_reuse_what_lies_on_the_same_machine(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder, first = tiny_folder("llama"), prompt(200)
    with served(folder, [2, 2], [tmp_path] * 2) as llm:
        right = ask(llm, first).token_ids
    for cuts in ([1, 3], [3, 1], [4], [1, 1, 2]):
        with served(folder, cuts, [tmp_path] * len(cuts)) as llm:
            out = ask(llm, first)
            assert (out.token_ids, out.num_cached_tokens) == (right, len(first) - 1)
    elsewhere = [tmp_path, tmp_path / "elsewhere"]
    with served(folder, [2, 2], elsewhere) as llm:  # the second stage is on a machine that has nothing
        out = ask(llm, first)
        assert (out.token_ids, out.num_cached_tokens) == (right, 0)


def test_other_models_and_dtypes_on_one_folder_do_not_meet(tiny_folder: Callable[..., Path], tmp_path: Path):
    first, outs = prompt(200), list[RequestOutput]()
    folders = [tiny_folder("llama"), tiny_folder("qwen3"), tiny_folder("llama", seed=5)]
    cases = [(folder, "auto") for folder in folders] + [(folders[0], "float16")]
    for _ in range(2):
        for folder, dtype in cases:
            with served(folder, cuts_of(folder), [tmp_path] * 2, dtype=dtype) as llm:
                outs.append(ask(llm, first))
    assert [out.num_cached_tokens for out in outs] == [0] * len(cases) + [len(first) - 1] * len(cases)
    assert [out.token_ids for out in outs[: len(cases)]] == [out.token_ids for out in outs[len(cases) :]]


def test_a_disk_that_is_full_is_a_line_in_the_log(
    tiny_folder: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder, first = tiny_folder("llama"), prompt(200)
    with served(folder, [2, 2], [tmp_path / "0", tmp_path / "1"], cap=1000) as llm:
        right = ask(llm, first).token_ids
        assert ask(llm, first).num_cached_tokens == len(first) - 1  # from memory
    assert "it is kept in memory only" in caplog.text
    assert not files(tmp_path)
    assert cold(folder, [2, 2], [first]) == [right]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_short_of_memory_the_rest_comes_from_disk(tiny_folder: Callable[..., Path], tmp_path: Path, kind: str):
    """What memory has lost is read again, among many at once; nobody can tell from the tokens."""
    folder = tiny_folder(kind)
    cuts = cuts_of(folder)
    prompts = [[*prompt(2 * BLOCK + 5, seed=i % 3), *prompt(20, seed=i)] for i in range(6)]
    params = SamplingParams(max_tokens=thorough(10, 20), ignore_eos=True)
    with pipeline(folder, cuts, prefix_cache=False, token_budget=BLOCK) as llm:
        alone = [llm.generate([one], params)[0].token_ids for one in prompts]
        ready = llm._engine.pipeline.ready
        per_block = max(stage.kv_bytes_stored * BLOCK // 256 for stage in ready)
        fixed = max(stage.kv_bytes_fixed for stage in ready)
    for num_blocks in (6, 16):
        with served(folder, cuts, [tmp_path] * 2, kv_bytes=num_blocks * per_block * 4 + 3 * fixed) as llm:
            for _ in range(thorough(2, 3)):
                assert [out.token_ids for out in llm.generate(prompts, params)] == alone
            assert llm._engine.scheduler.is_idle or not llm._engine.scheduler.running


def test_a_busy_machine_saves_the_last_answer_too(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Closing waits for the step that saves its KV, and for the disk, although each takes a second or more."""
    folder, asked = tiny_folder("llama"), prompt(BLOCK)
    save, write = KVPool.save, Folder.write
    monkeypatch.setattr(KVPool, "save", lambda *args: time.sleep(1.0) or save(*args))
    monkeypatch.setattr(Folder, "write", lambda *args: time.sleep(1.5) or write(*args))
    with served(folder, [4], [tmp_path]) as llm:
        answer = ask(llm, asked)
    assert max(file.name.end for file in Folder(tmp_path).all_files()) == len(asked) + len(answer.token_ids) - 1


def test_many_at_once_after_a_restart_read_each_block_once(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder, system, num = tiny_folder("llama"), prompt(3 * BLOCK, seed=2), 6
    prompts = [[*system, *prompt(7, seed=i)] for i in range(num)]
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.7, seed=5)
    with served(folder, [2, 2], [tmp_path] * 2) as llm:
        ask(llm, system, max_tokens=1)
    with served(folder, [2, 2], [tmp_path] * 2) as llm:
        outs = llm.generate(prompts, params)
        stats = llm.stats()
    assert [out.num_cached_tokens for out in outs] == [len(system)] * num
    assert stats["fetched_tokens"] == len(system)
    with pipeline(folder, [2, 2], prefix_cache=False) as llm:
        assert [out.token_ids for out in outs] == [llm.generate([one], params)[0].token_ids for one in prompts]


def test_a_stage_without_a_disk_keeps_all_from_theirs(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder, first = tiny_folder("llama"), prompt(150)
    with pipeline(folder, [2, 2], token_budget=BLOCK, kv_dir=tmp_path) as llm:  # the worker was started without one
        right = ask(llm, first).token_ids
        assert ask(llm, first).token_ids == right
    assert not files(tmp_path)


def test_a_coordinator_that_comes_back_finds_what_its_workers_kept(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder, first = tiny_folder("llama"), prompt(150)
    settings = Settings(kv_dir=tmp_path / "0", token_budget=BLOCK)
    with worker("tcp", Disk(tmp_path / "1", LONG)) as there:
        outs = []
        for _ in range(2):
            with LLM(layout(folder, [2, 2], [there]), settings=settings) as llm:
                outs.append(ask(llm, first))
    assert [out.num_cached_tokens for out in outs] == [0, len(first) - 1]
    assert outs[0].token_ids == outs[1].token_ids


@pytest.mark.parametrize(
    ("kind", "budget"),
    [("llama", 7), ("llama", 200), ("gemma3_text", 7), ("qwen3_moe", 200),
     long("gemma3_text", 200), long("qwen3_moe", 7)],
)  # fmt: skip
def test_other_chunks_after_a_restart_change_no_token(
    tiny_folder: Callable[..., Path], tmp_path: Path, kind: str, budget: int
):
    folder, first = tiny_folder(kind), prompt(150)
    cuts = cuts_of(folder)
    with served(folder, cuts, [tmp_path] * 2) as llm:
        said = [*first, *ask(llm, first).token_ids]
    turn = [*said[:-20], *prompt(70, seed=5)]
    with pipeline(folder, cuts, disks=[Disk(tmp_path, LONG)] * 2, token_budget=budget) as llm:
        hit = ask(llm, turn, temperature=0.8, seed=4)
    assert hit.num_cached_tokens == len(said) - 20
    assert cold(folder, cuts, [turn], temperature=0.8, seed=4) == [hit.token_ids]
