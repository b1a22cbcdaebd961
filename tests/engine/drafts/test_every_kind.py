"""What holds of every kind of drafter on the last stage: tokens as without drafts, however right the drafts are and
whatever the cut; and KV that is kept and found. A lost worker: ``test_every_class``."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import loaded_once
import pytest
from engine.door import SEVERAL, Ask, Open, ask, leaves_nothing, recut
from stages import prompt
from tiny import Folder
from trained import KINDS

from splitinfer import Flight
from splitinfer.engine.stage import outcomes
from splitinfer.kvstore.store import Disk
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load import loader
from splitinfer.wire.messages import Load

Make = Callable[..., tuple[Path, str]]
NIGHTLY = pytest.mark.nightly
CUTS = ([4], [1, 3], [2, 2], [3, 1], [1, 1, 2], [1, 2, 1], [2, 1, 1])
DRAFTED = tuple(replace(one, flight=Flight(3)) for one in SEVERAL)


@pytest.mark.parametrize(("kind", "name", "cuts"), [
    ("eagle3", "qwen3", [1, 1, 2]), ("dflash2", "qwen3", [2, 2]), ("latent", "", [1, 3]),
    *(pytest.param(*one, marks=NIGHTLY) for one in product(KINDS, ["llama", "qwen3", "qwen3_moe", "qwen3_next"], CUTS)),
], ids=str)  # fmt: skip
def test_tokens_are_those_without_drafts(kind: str, name: str, cuts: list[int], drafter: Make, pipeline: Open) -> None:
    """In batches and chunks, with blocks of different lengths in a step."""
    folder, draft = drafter(kind, name)
    with pipeline(folder, cuts, draft=draft, token_budget=16) as there:
        for flights in ((None,) * 3, (Flight(3), Flight(7), Flight(1))):
            there.answers(*(replace(one, flight=flight) for one, flight in zip(SEVERAL, flights, strict=True)))
        assert there.stats["speculation"]["sent"] > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_that_is_unloaded_leaves_no_memory_behind(
    kind: str, drafter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded_once.each_time(monkeypatch)
    folder, draft = drafter(kind, "qwen3")
    of_drafter = {} if draft == "mtp" else {"drafter_fingerprint": open_folder(Path(draft)).fingerprint()}
    command = Load(
        str(folder), "float32", 0, (0, 4), open_folder(folder).fingerprint(), 100, 64, b"", "exact",
        float32_head=False, drafter=draft, **of_drafter,
    )  # fmt: skip
    assert leaves_nothing(command)


@pytest.mark.parametrize("kind", ["", "mtp", "eagle3"])
def test_of_the_same_stages_these_tests_survey_and_try_one(
    kind: str,
    drafter: Make,
    pipeline: Open,
    tiny_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy is the same. Without that, the tests of ``engine`` take twice as long (``loaded_once.py``)."""
    folder, draft = drafter(kind, "qwen3") if kind else (tiny_folder("qwen3"), "")
    options: dict[str, str] = {"draft": draft} if kind else {}
    with pipeline(folder, [2, 2], **options) as there:
        there.answers(ask(9))
    for module, name in ((loader, "find_tables"), (outcomes, "with_each_kind")):
        monkeypatch.setattr(module, name, Mock(side_effect=AssertionError(name)))
    with pipeline(shutil.copytree(folder, tmp_path / "copy"), [2, 2], are_checked=False, **options) as there:
        there.answers(ask(9))


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "cuts"), list(product(KINDS, [[4], [2, 2]])), ids=str)
def test_a_last_stage_across_two_machines(kind: str, cuts: list[int], drafter: Make, pipeline: Open) -> None:
    folder, draft = drafter(kind, "qwen3")
    with pipeline(folder, cuts, draft=draft, token_budget=64, across=[len(cuts) - 1]) as there:
        there.answers(*DRAFTED)
        assert there.stats["speculation"]["sent"] > 10


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_links_that_pack_prompts(kind: str, drafter: Make, pipeline: Open) -> None:
    """The rows of taps are packed by themselves."""
    (folder, draft), found = drafter(kind, "qwen3"), []
    for options in ({}, {"draft": draft}):
        with pipeline(folder, [1, 2, 1], codec="int8", token_budget=16, are_checked=False, **options) as there:
            found.append(there.answers(*DRAFTED))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dflash", marks=NIGHTLY)])
@pytest.mark.parametrize("beside", ["", pytest.param("+ngram", marks=NIGHTLY)])
def test_drafts_that_are_all_right_or_all_wrong(kind: str, beside: str, drafter: Make, pipeline: Open) -> None:
    """A drafter that likes one token: of other answers no draft is right, but n-grams', and those that a request's bias
    moves, where the drafter has all tokens. A link carries one row more for each token, of prompts, too."""
    folder, draft = drafter(kind, "qwen3", only=77)
    with pipeline(folder, [2, 2], draft=draft + beside, token_budget=64) as there:
        for token in (77, 5):
            before = there.stats["speculation"]
            there.answers(replace(ask(300, max_tokens=40, logit_bias={token: 100.0}), flight=Flight(3)))
            after = there.stats["speculation"]
            accepted, sent = (after[name] - before[name] for name in ("accepted", "sent"))
            assert sent >= 15
            are_right = token == 77 or kind == "dflash"
            assert accepted == (sent if are_right else 0) or (beside and accepted >= 20)
            row = 64 * 4
            assert token != 77 or there.stats["bytes_per_token"] == pytest.approx(2 * row, rel=0.1)


@pytest.mark.parametrize("kind", ["eagle3", *(pytest.param(kind, marks=NIGHTLY) for kind in (*KINDS, "latent"))])
def test_another_cut(kind: str, drafter: Make, pipeline: Open) -> None:
    folder, draft = drafter(kind, "qwen3")
    with pipeline(folder, [2, 2], draft=draft, token_budget=64, fault=recut([1, 3], at=4)) as there:
        there.answers(*DRAFTED)


@pytest.mark.parametrize("kind", ["dflash", "latent", *(pytest.param(kind, marks=NIGHTLY) for kind in KINDS)])
def test_kv_on_disk_has_the_drafters_own(
    kind: str, tmp_path: Path, drafter: Make, pipeline: Open, proposed: list[tuple[list[int], list[int]]]
) -> None:
    """The whole pipeline ends, and begins anew: what was kept is found, and so is the first turn by the second one.
    Drafts are those of before, but where the entry behind the kept ones was made of a hidden state that is gone."""
    folder, draft = drafter(kind, "qwen3", max_position_embeddings=1024)
    first = replace(ask(300, max_tokens=12), flight=Flight(3))
    options = {"draft": draft, "disks": [Disk(tmp_path / f"kv{i}", 2**30) for i in range(2)], "token_budget": 64}
    with pipeline(folder, [2, 2], **options) as there:
        (said,) = there.answers(first)
        second = Ask((*first.tokens, *said, *prompt(260, seed=4)), first.params, flight=Flight(3))
        there.answers(replace(second, flight=Flight()))
    before = {tuple(tokens): drafts for tokens, drafts in proposed}
    proposed.clear()
    with pipeline(folder, [2, 2], **options) as there:
        (again,) = there.outputs(first)
        alike = [before[tuple(tokens)] == drafts for tokens, drafts in proposed if tuple(tokens) in before]
        (turn,) = there.outputs(second)
    assert again.num_cached_tokens >= 256
    assert turn.num_cached_tokens >= 512
    assert sum(alike) >= (1 if kind.startswith("dflash") else 0.7) * len(alike) > 2
