"""Drafters of mlx-vlm's classes: drafts as from the class itself, and tokens as without drafts, whatever happens."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from constrained import SCHEMA, VOCABULARY
from engine.door import NOTHING, SEVERAL, Ask, Open, ask, num_layers, worker_lost
from stages import prompt

from splitinfer import Flight, SamplingParams
from splitinfer.demo import TARGET
from splitinfer.errors import ModelError, Refused
from splitinfer.kvstore.store import Disk
from splitinfer.models.drafters.sequence_heads import splitter_of
from splitinfer.text.tokenizer import Tokenizer

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from engine.drafts.classes import FOLDERS, STORED, in_a_folder, saved

BY_CHUNKS = ("deepseek_v4", "hy_v4")  # whose own tokens depend on the chunks that they are computed in
NIGHTLY = pytest.mark.nightly
Proposed = list[tuple[list[int], list[int]]]


@pytest.mark.parametrize(("name", "cut"), [
    ("dspark", 1), ("laguna", 2), ("gemma4_assistant", 1), ("gemma4_dflash", 2),
    *(pytest.param(*one, marks=NIGHTLY) for one in product(FOLDERS, (0, 1, 2))),
], ids=str)  # fmt: skip
def test_drafts_are_those_of_mlx_vlms_class(
    name: str, cut: int, tmp_path: Path, pipeline: Open, proposed: Proposed
) -> None:
    target, drafter, theirs = in_a_folder(name, tmp_path)
    layers = num_layers(target)
    cuts = ([layers], [1, layers - 1] if "shared" not in name else [4, 2], [1, 1, layers - 2])[cut]
    asks = [replace(ask(20 + 15 * i, prompt=i), flight=Flight(3 + i)) for i in range(2)]
    with pipeline(target, cuts, token_budget=16, draft=str(drafter), are_checked=False) as there:
        there.answers(*asks)
    assert len(proposed) > 10
    assert [found for _, found in proposed] == [theirs(tokens, len(found)) for tokens, found in proposed]


DSPARK = FOLDERS["dspark"]["dflash_config"]


@pytest.mark.parametrize(("name", "told", "cuts", "reason"), [
    ("dspark", {"dflash_config": DSPARK | {"num_target_layers": 36}}, [4], "a model of 36 layers, and llama has 4"),
    ("dspark", {"vocab_size": 5000}, [4], "a vocabulary of 5,000 tokens, and llama has 160"),
    ("gemma4_assistant", {"backbone_hidden_size": 32}, [6], "hidden states of 32 numbers, and those of .* have 64"),
    ("gemma4_assistant", {}, [5, 1], r"values of layer 4 \(counted from 0\), .* give it layers 4 to 5"),
], ids=str)  # fmt: skip
def test_a_drafter_that_does_not_fit_is_refused(
    name: str, told: dict[str, Any], cuts: list[int], reason: str, tmp_path: Path, pipeline: Open, monkeypatch: Any
) -> None:
    target, drafter, _ = in_a_folder(name, tmp_path / "right")
    if told:
        monkeypatch.setitem(FOLDERS, name, FOLDERS[name] | told)
        _, drafter, _ = in_a_folder(name, tmp_path / "wrong")
    with pytest.raises((ModelError, Refused), match=reason), pipeline(target, cuts, draft=str(drafter)):
        pass


def test_a_last_stage_without_any_layer_that_the_drafter_reads(
    tmp_path: Path, pipeline: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"dflash_config": DSPARK | {"target_layer_ids": [0, 1, 2]}}
    monkeypatch.setitem(FOLDERS, "dspark", FOLDERS["dspark"] | told)
    target, drafter, _ = in_a_folder("dspark", tmp_path)
    with pipeline(target, [3, 1], draft=str(drafter)) as there:
        there.answers(replace(ask(20), flight=Flight(3)))
        assert there.stats["speculation"]["sent"] > 10


def test_dspark_within_a_checkpoint_needs_a_folder() -> None:
    with pytest.raises(ModelError, match=r"needs a folder of its own: .*deepseek_v4_dspark.split"):
        splitter_of({"model_type": "deepseek_v4", "dspark_target_layer_ids": [1, 2, 3]})


ROADS: dict[str, dict[str, Any]] = {
    "four requests": {}, "a lost worker": {"fault": worker_lost(at=4), "rejoin_timeout": 60, "token_budget": 16},
    "short of memory": {"block": 8}, "in a form": {}, "from disk": {"block": 16},
}  # fmt: skip
LITTLE = {
    "glm5_next": ([], 60, 400),
    "inkling": ([], 60, 6000),
    "gemma4_dflash": ([1, 5], 300, 2540),
    "gemma4_assistant": ([1, 5], 300, 2258),
    "gemma4_assistant, ordered": ([1, 5], 300, 2258),
    "gemma4_assistant, shared": ([1, 5], 300, 1482),
}  # a cut, tokens of answers, and KB of KV on a stage: two requests begin there, and do not end together
ROWS = ("mtp", "eagle3", "dflash", "dflash2", "latent")
NO_DISK = {("from disk", "qwen4_exp")}  # the head's state there has more arrays than in a sample
KINDS = (*ROWS, *(name for name in STORED if name not in BY_CHUNKS), *FOLDERS)


@pytest.mark.parametrize(("road", "kind"), [
    ("four requests", "muse_glimmer"), ("a lost worker", "gemma4_assistant"), ("short of memory", "dspark"),
    ("in a form", "gemma4_dspark"), ("from disk", "laguna"), ("short of memory", "eagle3"),
    ("a lost worker", "nemotron_h"), ("a lost worker", "latent"),
    *(pytest.param(*one, marks=NIGHTLY) for one in product(ROADS, KINDS) if one not in NO_DISK),
])  # fmt: skip
def test_tokens_are_those_without_drafts(
    road: str,
    kind: str,
    tmp_path: Path,
    pipeline: Open,
    drafter: Callable[..., tuple[Path, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and at temperature 1, one request and four, with drafts of which some are wrong. The right ones count; a
    lost worker's are in chunks."""
    sizes = {"vocab_size": VOCABULARY} if road == "in a form" else {}
    folder, draft = tmp_path / "target", "mtp"
    if kind in ROWS:
        folder, draft = drafter(kind, "qwen3", **sizes)
    elif kind in FOLDERS:
        draft = str(in_a_folder(kind, tmp_path, **sizes)[1])
    else:
        saved(kind, folder, **sizes)
    alone = ask(30, temperature=1.0)
    asks = [*SEVERAL, alone, ask(20, prompt=3)]
    if road == "in a form":
        shutil.copy(TARGET / "tokenizer.json", folder)
        tokenizer = Tokenizer.from_folder(TARGET, 0)  # not from a target's folder: some tiny configurations are refused
        monkeypatch.setattr(Tokenizer, "from_folder", lambda *_args: tokenizer)
        params = SamplingParams(grammar=SCHEMA, temperature=1.0, seed=7, max_tokens=30)
        asks = [replace(one, params=replace(params, temperature=one.params.temperature)) for one in asks[:2]]
    asks = [replace(one, tokens=tuple(t % 100 for t in one.tokens), flight=Flight(2 + i)) for i, one in enumerate(asks)]
    options = {"fault": NOTHING, "token_budget": 64, "draft": draft, **ROADS[road]}
    cuts = [2, num_layers(folder) - 2]
    if road == "short of memory":  # answers grow, so that the requests do not just wait for each other
        cut, length, most = LITTLE.get(kind, ([], 60, 128))
        asks = [replace(one, params=replace(one.params, max_tokens=length)) for one in asks]
        cuts, options["kv_bytes"] = cut or cuts, most * 1024
    if road == "from disk":
        options["disks"] = [Disk(tmp_path / f"kv{i}", 2**30) for i in range(2)]
    with pipeline(folder, cuts, **options) as there:
        there.answers(*asks)
        said = there.answers(asks[-1])[0]
        assert there.stats["speculation"]["accepted"] <= there.stats["speculation"]["sent"] > 10
        assert (there.stats["preemptions"] > 0) == (road == "short of memory")
    if road == "from disk":
        with pipeline(folder, cuts, **options) as there:
            turn = Ask((*asks[-1].tokens, *said, *prompt(20, seed=4)), asks[-1].params, flight=Flight(3))
            (output,) = there.outputs(replace(turn, tokens=tuple(t % 100 for t in turn.tokens)))
        assert output.num_cached_tokens >= 16
