"""What holds of every kind of drafter on the last stage: tokens as without drafts, and KV that is kept and found."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from effort import long
from stages import lose, pipeline, prompt, shorten_blocks
from trained import KINDS, noted_proposals, of_kind

from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.kvstore.store import Disk

NUM = 14
SEVERAL = [
    (prompt(20 + 9 * i, seed=i), SamplingParams(max_tokens=NUM, ignore_eos=True, **how))
    for i, how in enumerate(({}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "seed": 6}))
]
TARGETS = ["llama", "qwen3_moe", "qwen3_next"]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_right_and_wrong_drafts_another_cut_a_loss_and_the_same_prompt(kind: str, tmp_path: Path) -> None:
    """A drafter that knows one token. Where answers are of nothing else every draft is right, and else none. A link
    carries one row more for each token, of prompts, too."""
    folder = tiny.save(tmp_path / "qwen3", "qwen3")
    drafter = of_kind(kind, folder, tmp_path / "drafter", only=77)
    params = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={77: 100.0})
    with pipeline(folder, [2, 2], draft=drafter, token_budget=64, rejoin_timeout=20) as llm:
        first = llm.submit(prompt(300, seed=1), params, flight=Flight(3)).result()
        assert first.token_ids == [77] * 24
        counts = llm.stats()["speculation"]
        assert counts["accepted"] == counts["sent"] >= 15
        again = llm.submit(prompt(300, seed=1), params, flight=Flight(3)).result()
        assert (again.token_ids, again.num_cached_tokens >= 256) == ([77] * 24, True)
        row, figures = 64 * 4, llm.stats()
        assert figures["bytes_per_token"] == pytest.approx(2 * row, rel=0.1)
        plain = SamplingParams(max_tokens=24, ignore_eos=True)
        expected = [llm.submit(prompt(40, seed=i), plain, flight=Flight()).result().token_ids for i in range(2)]
        for disturb in (lambda: llm.recut([1, 3]), lambda: lose(llm)):
            under_way = [llm.submit(prompt(40, seed=i), plain, flight=Flight(2)) for i in range(2)]
            next(events := iter(under_way[0]))
            disturb()
            assert under_way[1].result().token_ids == expected[1]
            assert len(list(events)) > 0
            assert under_way[0].output.token_ids == expected[0]


@pytest.mark.parametrize("kind", [long("eagle3"), "dflash"])
def test_n_grams_beside_drafts_that_are_always_wrong(kind: str, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "qwen3", "qwen3")
    draft = of_kind(kind, folder, tmp_path / "drafter", only=77)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={5: 100.0})
    for named, is_right in ((draft, False), (f"{draft}+ngram", True)):
        with pipeline(folder, [2, 2], draft=named) as llm:
            assert llm.submit(prompt(20), params, flight=Flight(3)).result().token_ids == [5] * 40
            assert (llm.stats()["speculation"]["accepted"] >= 20) == is_right


@pytest.mark.parametrize("kind", [long("mtp"), "eagle3", "dflash", long("dflash2")])
def test_kv_on_disk_has_the_drafters_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole pipeline ends, and begins anew: what was kept is found, and so is the first turn by the second one.
    Drafts are those of before, but where the entry behind the kept ones was made of a hidden state that is gone."""
    proposed = noted_proposals(monkeypatch)
    folder = tiny.save(tmp_path / "qwen3", "qwen3", max_position_embeddings=1024)
    tokens = prompt(300, seed=3)
    draft, params = of_kind(kind, folder, tmp_path / "drafter"), SamplingParams(max_tokens=12, ignore_eos=True)
    disks = [Disk(tmp_path / f"kv{i}", 2**30) for i in range(2)]
    with pipeline(folder, [2, 2], draft=draft, disks=disks, token_budget=64) as llm:
        first = llm.submit(tokens, params, flight=Flight(3)).result().token_ids
        second = [*tokens, *first, *prompt(260, seed=4)]
        expected = llm.submit(second, params, flight=Flight()).result().token_ids
    before = {tuple(tokens): drafts for tokens, drafts in proposed}
    proposed.clear()
    with pipeline(folder, [2, 2], draft=draft, disks=disks, token_budget=64) as llm:
        again = llm.submit(tokens, params, flight=Flight(3)).result()
        assert (again.token_ids, again.num_cached_tokens >= 256) == (first, True)
        alike = [before[tuple(tokens)] == drafts for tokens, drafts in proposed if tuple(tokens) in before]
        assert sum(alike) >= (1 if kind.startswith("dflash") else 0.7) * len(alike) > 2
        turn = llm.submit(second, params, flight=Flight(3)).result()
        assert (turn.token_ids, turn.num_cached_tokens >= 512) == (expected, True)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next"])
def test_every_cut(kind: str, name: str, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / name, name)
    draft = of_kind(kind, folder, tmp_path / "drafter")
    for cuts in ([4], [1, 3], [2, 2], [3, 1], [1, 1, 2], [1, 2, 1], [2, 1, 1]):
        with pipeline(folder, cuts, token_budget=16) as llm:
            expected = [one.result().token_ids for one in [llm.submit(*one) for one in SEVERAL]]
        with pipeline(folder, cuts, token_budget=16, draft=draft) as llm:
            under_way = [llm.submit(*one, flight=Flight(3)) for one in SEVERAL]
            assert [one.result().token_ids for one in under_way] == expected, cuts


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_thirty_losses(kind: str, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "qwen3", "qwen3")
    draft = of_kind(kind, folder, tmp_path / "drafter")
    with pipeline(folder, [2, 2], token_budget=16) as llm:
        expected = [llm.submit(*one).result().token_ids for one in SEVERAL]
    with pipeline(folder, [2, 2], token_budget=16, draft=draft, rejoin_timeout=20) as llm:
        for _ in range(30):
            under_way = [llm.submit(*one, flight=Flight(2)) for one in SEVERAL]
            next(events := iter(under_way[0]))
            lose(llm)
            assert len(list(events)) > 0
            assert [one.result().token_ids for one in under_way[1:]] == expected[1:]
            assert under_way[0].output.token_ids == expected[0]
        assert llm.stats()["rejoins"] >= 30


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_who_gives_up_its_kv_gets_the_same_tokens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_blocks(monkeypatch, 8)
    folder, several = tiny.save(tmp_path / "qwen3", "qwen3"), [(a, replace(b, max_tokens=60)) for a, b in SEVERAL]
    draft = of_kind(kind, folder, tmp_path / "drafter")
    with pipeline(folder, [2, 2]) as llm:
        expected = [llm.submit(*one).result().token_ids for one in several]
    own = 512 if kind.startswith("dflash") else 256
    with pipeline(folder, [2, 2], draft=draft, kv_bytes=(512 + own) * 120) as llm:
        under_way = [llm.submit(*one, flight=Flight(2)) for one in several]
        assert [one.result().token_ids for one in under_way] == expected
        assert llm.stats()["preemptions"] > 0
