"""KV that is kept, in memory or on disk, gives the tokens it gives cold, whatever happens to the files."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from engine import door
from engine.door import Ask, Open, ask
from processes import until
from stages import prompt
from tiny import Folder

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.core.scheduler.kv_manager import KVManager
from splitinfer.engine.stage.disk import group_of
from splitinfer.kvstore.store import Disk
from splitinfer.models.caches import kv_blocks
from splitinfer.wire.messages import Load

BLOCK = 64  # WindowKVCache keeps positions aligned to this
LARGE = 10**9  # bytes
NIGHTLY = pytest.mark.nightly
USUAL = {"block": BLOCK, "token_budget": BLOCK}
FIRST = ask(200, max_tokens=8)


@pytest.fixture(autouse=True)
def reading_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether KV is read or computed again follows from measured times: on a busy machine a tiny model is computed
    faster than its first block was read, and the next one is not read."""
    monkeypatch.setattr(KVManager, "reads_faster", lambda _self, _num_tokens, _rows: True)


@pytest.fixture(autouse=True)
def coordinators_end_by_themselves(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """When the last KV is saved, and not because somebody has waited for that in vain."""
    caplog.set_level(logging.INFO)
    yield
    assert not [one for one in caplog.get_records("call") if "the coordinator was stopped" in one.getMessage()]


def disks(paths: Sequence[Path], cap: int = LARGE) -> list[Disk]:
    return [Disk(path, cap) for path in paths]


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, pipeline: Open) -> list[Path]:
    """What ``kept`` gives copies of."""
    made = tmp_path_factory.mktemp("kept")
    paths = [made / "0", made / "1"]
    with pipeline("llama", [2, 2], disks=disks(paths), **USUAL) as there:
        there.answers(FIRST)
    return paths


@pytest.fixture
def kept(written: list[Path], tmp_path: Path) -> list[Path]:
    """KV of ``FIRST``, 200 tokens, on the disks of two stages that have ended; this test may do to it what it likes."""
    return [shutil.copytree(path, tmp_path / path.name) for path in written]


@pytest.mark.parametrize(("kind", "num_stages"), [
    ("qwen3_next", 2), pytest.param("llama", 3, marks=NIGHTLY),
    *(pytest.param(kind, 2, marks=NIGHTLY) for kind in ("gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3")),
])  # fmt: skip
def test_after_all_were_restarted_the_next_turn_gets_the_tokens_it_gets_cold(
    kind: str, num_stages: int, tiny_folder: Folder, tmp_path: Path, pipeline: Open
) -> None:
    cuts = [door.num_layers(tiny_folder(kind)) - num_stages + 1, *[1] * (num_stages - 1)]
    where = disks([tmp_path / str(i) for i in range(num_stages)])
    asks = [ask(150, max_tokens=8), ask(170, prompt=4, max_tokens=8, temperature=0.8)]
    with pipeline(kind, cuts, disks=where, **USUAL) as there:
        said = [(*one.tokens, *there.answers(one)[0]) for one in asks]
    turns = [Ask((*before, *prompt(9, seed=5)), one.params) for before, one in zip(said, asks, strict=True)]
    with pipeline(kind, cuts, disks=where, **USUAL) as there:
        hits = [there.outputs(turn)[0] for turn in turns]
        assert [hit.num_cached_tokens for hit in hits] == [len(before) - 1 for before in said]
        computed = [len(turn.tokens) - hit.num_cached_tokens + 7 for turn, hit in zip(turns, hits, strict=True)]
        assert there.stats["computed_tokens"] == sum(computed)


@pytest.mark.parametrize("budget", [7, pytest.param(200, marks=NIGHTLY)])
@pytest.mark.parametrize("kind", ["llama", *(pytest.param(one, marks=NIGHTLY) for one in ("gemma3_text", "qwen3_moe"))])
def test_other_chunks_and_an_edited_turn_after_a_restart(
    kind: str, budget: int, tmp_path: Path, pipeline: Open
) -> None:
    with pipeline(kind, [2, 2] if kind != "gemma3_text" else [5, 1], disks=disks([tmp_path] * 2), **USUAL) as there:
        said = (*FIRST.tokens, *there.answers(FIRST)[0])
    turn = Ask((*said[:-20], *prompt(70, seed=5)), replace(FIRST.params, temperature=0.8))
    options = {"disks": disks([tmp_path] * 2), "block": BLOCK, "token_budget": budget}
    with pipeline(kind, [2, 2] if kind != "gemma3_text" else [5, 1], **options) as there:
        (hit,) = there.outputs(turn)
    assert hit.num_cached_tokens == len(said) - 20


@pytest.mark.parametrize("is_up", [False, True])
def test_what_one_stage_has_lost_is_computed_again_and_kept_again(
    kept: list[Path], is_up: bool, pipeline: Open
) -> None:
    """Before the pipeline is up; or under its eyes, where the coordinator believes that every stage has the blocks."""

    def lose() -> None:
        for path in files(kept[1])[2 if is_up else 0 :]:
            path.unlink()

    if not is_up:
        lose()
    with pipeline("llama", [2, 2], disks=disks(kept), **USUAL) as there:
        if is_up:
            lose()
        (out,) = there.outputs(FIRST)
        assert is_up or out.num_cached_tokens == 0
        assert there.stats["rejoins"] == 0, "no stage believed to have what could not be read"
    with pipeline("llama", [2, 2], disks=disks(kept), **USUAL) as there:
        (again,) = there.outputs(FIRST)
    assert again.num_cached_tokens == len(FIRST.tokens) - 1


def test_after_a_loss_what_is_on_disk_is_known(kept: list[Path], pipeline: Open) -> None:
    with pipeline("llama", [2, 2], disks=disks(kept), **USUAL) as there:
        there.cut()
        until(lambda: there.stats["rejoins"] == 1, "the stage is back", door.SECONDS)
        assert there.outputs(FIRST)[0].num_cached_tokens == len(FIRST.tokens) - 1


def test_what_an_answer_under_way_has_read_is_saved_when_the_pipeline_is_closed(tmp_path: Path, pipeline: Open) -> None:
    where = disks([tmp_path / "0", tmp_path / "1"])
    with pipeline("llama", [2, 2], disks=where, **USUAL) as there:
        (request,) = there.submit(replace(FIRST, params=replace(FIRST.params, max_tokens=500)))
        there.read(request, 1)
        there.llm.close()
    answer = request.output
    assert answer.finish_reason == "abort"
    with pipeline("llama", [2, 2], disks=where, **USUAL) as there:
        (again,) = there.outputs(Ask((*FIRST.tokens, *answer.token_ids), FIRST.params))
    assert again.num_cached_tokens == len(FIRST.tokens) + len(answer.token_ids) - 1


def test_all_that_kv_depends_on_is_in_the_name_of_its_group() -> None:
    """With the dtype "auto" the coordinator's root is the same for a GPU, which keeps the weights' dtype, and for a
    processor, which computes in float32."""

    def command(root: bytes) -> Load:
        return Load("demo", "auto", 0, (0, 2, 4), Fingerprint("f"), 9, 64, root, "exact", float32_head=False)

    groups = [group_of(command(root), dtype) for root in (b"root", b"other") for dtype in (None, "float32", "float16")]
    assert len(set(groups)) == 6


@pytest.mark.parametrize("kv_format", ["exact", pytest.param("k8v4", marks=NIGHTLY)])
def test_what_is_given_up_for_others_is_read_again(
    kv_format: str, tiny_folder: Folder, tmp_path: Path, pipeline: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for one long answer and a part of another: the younger one waits, and is not computed again."""
    monkeypatch.setattr(kv_blocks, "_ROOM", 16)  # what a kept block is counted with
    folder = tiny_folder("llama", head_dim=64)
    asks = [ask(60, prompt=1, max_tokens=100, temperature=0.8), ask(8, prompt=2, max_tokens=75, temperature=0.8)]
    per_token = 2 * 2 * 2 * 64 * (4 if kv_format == "exact" else 0.875)
    options = {"disks": disks([tmp_path / name for name in "ab"]), "kv_bytes": int(11 * 16 * per_token)}
    with pipeline(folder, [2, 2], block=16, kv_format=kv_format, **options) as there:
        there.answers(*asks)
        stats = there.stats
    assert min(stats[name] for name in ("preemptions", "swapped_tokens", "fetched_tokens")) > 0
    assert stats["read_seconds_per_token"] > 0


def test_a_stage_without_a_disk_keeps_all_from_theirs(tmp_path: Path, pipeline: Open) -> None:
    with pipeline("llama", [2, 2], kv_dir=tmp_path, **USUAL) as there:  # the worker was started without one
        there.answers(FIRST)
        there.answers(FIRST)
    assert not files(tmp_path)


MORE = product(["llama", "gemma3_text", "qwen3_next", "qwen3_moe", "gpt_oss", "deepseek_v3"], [True, False])


@pytest.mark.parametrize(("kind", "is_left"), [
    ("llama", True), ("qwen3_next", False),
    *(pytest.param(*one, marks=pytest.mark.nightly) for one in MORE),
])  # fmt: skip
def test_a_second_turn_gets_the_tokens_it_gets_cold(
    kind: str, is_left: bool, tiny_folder: Folder, pipeline: Open
) -> None:
    """In the KV that the first one left; in a copy of its blocks, where another request has come between."""
    first = ask(150, max_tokens=8, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5)
    cuts = [door.num_layers(tiny_folder(kind)) - 2, 1, 1]
    with pipeline(kind, cuts, block=BLOCK, token_budget=BLOCK) as there:
        (said,) = there.answers(first)
        if not is_left:
            there.answers(ask(3))
        before = sum(stage["bytes_copied"] for stage in there.stats["stages"])
        turn = Ask((*first.tokens, *said, *prompt(9, seed=5)), first.params)
        (hit,) = there.outputs(turn)
        copied = sum(stage["bytes_copied"] for stage in there.stats["stages"]) - before
        (edited,) = there.outputs(Ask((*turn.tokens[:140], *prompt(9, seed=5)), first.params))
    assert hit.num_cached_tokens == len(first.tokens) + len(said) - 1
    assert (copied == 0) is is_left
    assert edited.num_cached_tokens >= 128
