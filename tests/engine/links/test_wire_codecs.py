"""Links that pack prompts: other tokens than exact links may give, but the same ones on every road."""

import logging
from itertools import accumulate, product
from pathlib import Path

import mlx.core as mx
import pytest
from engine.door import Ask, Open, ask
from stages import loaded
from tiny import Folder

from splitinfer.core.codecs import CODECS, FP16, INT8, NONE
from splitinfer.kvstore.store import Disk
from splitinfer.models.border.hidden_states import pack, unpack

NIGHTLY = pytest.mark.nightly
FIRST = ask(70)
SAMPLED = ask(70, temperature=0.8)
PACKED = {"are_checked": False}  # against exact links; these tests compare with the same codec
CUTS = ([1, 3], [1, 2, 1])


def by_hand(folder: Path, cuts: list[int], codec: str, one: Ask) -> list[int]:
    """The stages one after another, the prompt's rows packed between them, all others not."""
    stages, said = loaded(folder, *accumulate(cuts)), list[int]()
    caches, ids = [stage.make_caches() for stage in stages], list(one.tokens)
    while len(said) < one.params.max_tokens:
        hidden = None
        for stage, cache in zip(stages, caches, strict=True):
            out = stage(mx.array([ids], dtype=mx.int32), cache, hidden, 1)
            hidden = None if stage.is_last else out
            if hidden is not None and not said:
                hidden = unpack(codec, pack(codec, hidden[0])[1], hidden.dtype)[None]
        said.append(int(mx.argmax(out[0, -1]).item()))
        ids = said[-1:]
    return said


@pytest.mark.parametrize(("name", "codec", "cuts"), [
    ("llama", "fp8", CUTS[1]), ("qwen3_moe", INT8, CUTS[0]),
    *(pytest.param(*one, marks=NIGHTLY) for one in product(["llama", "qwen3", "qwen3_moe"], CODECS, CUTS)),
], ids=str)  # fmt: skip
def test_prompts_are_packed_and_nothing_else(
    name: str, codec: str, cuts: list[int], tiny_folder: Folder, pipeline: Open
) -> None:
    expected = by_hand(tiny_folder(name), cuts, codec, FIRST)
    for budget in (512, 16):
        with pipeline(name, cuts, token_budget=budget, codec=codec, **PACKED) as there:
            assert there.answers(FIRST) == [expected], budget
            assert [stage.get("codec") for stage in there.stats["stages"]] == [*[codec] * (len(cuts) - 1), None]


def test_kv_of_another_codec_is_not_seen_and_stays(tmp_path: Path, pipeline: Open) -> None:
    disks, found = [Disk(tmp_path / name, 10**9) for name in "ab"], dict[str, list[list[int]]]()
    for codec in (NONE, INT8, NONE, INT8):
        with pipeline("llama", [2, 2], block=16, codec=codec, disks=disks, **PACKED) as there:
            answers = there.answers(SAMPLED)
            assert (there.stats["fetched_tokens"] > 0) == (codec in found)
            assert found.setdefault(codec, answers) == answers


def test_half_of_a_model_in_sixteen_bits_is_none(pipeline: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pipeline("llama", [2, 2], dtype="bfloat16", codec=FP16) as there:
        assert there.stats["stages"][0]["codec"] == NONE
    assert "does not make hidden states of bfloat16 smaller" in caplog.text
