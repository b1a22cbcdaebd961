"""Links that pack prompts: other tokens than exact links may give, but the same ones on every road."""

import logging
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
import tiny
from effort import long, thorough
from stages import pipeline, prompt, shorten_blocks, tokens_of

import splitinfer
from splitinfer.bench.speculation.replay import Replay
from splitinfer.core.speculation.flight import Flight
from splitinfer.core.wire_codec import AUTO, CODECS, FP16, INT8, NONE
from splitinfer.engine.links import codecs as link_codecs
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM
from splitinfer.models import kv_blocks
from splitinfer.models.checkpoint import open_folder
from splitinfer.models.codecs import pack, unpack
from splitinfer.models.cut import StageModel
from splitinfer.models.loader import load_stage, survey

PROMPT = prompt(70)
NUM = 24
NAMES = ["llama", "qwen3", "qwen3_moe"]
USUAL = {
    ("llama", FP16, 2), ("llama", "fp8", 3), ("llama", INT8, 2), ("qwen3", "fp8", 2), ("qwen3", INT8, 3),
    ("qwen3_moe", FP16, 3), ("qwen3_moe", INT8, 2),
}  # fmt: skip
ROADS = [(name, codec, num_stages) for name in NAMES for codec in CODECS for num_stages in (2, 3)]
PARTLY = ["gemma3_text", "gpt_oss", "qwen3_next"]


def sampled(llm: LLM, tokens: list[int]) -> list[int]:
    return tokens_of(llm, tokens, max_tokens=NUM, temperature=0.8, seed=5)


def greedy(llm: LLM, tokens: list[int]) -> list[int]:
    return tokens_of(llm, tokens, max_tokens=NUM)


def likely(llm: LLM, tokens: list[int]) -> float:
    """How likely the first token of the answer is: it depends on every row of the prompt."""
    params = splitinfer.SamplingParams(max_tokens=1, logprobs=1)
    return llm.generate([list(tokens)], params)[0].logprobs[0].logprob


def shape(name: str, num_stages: int) -> list[int]:
    n = tiny.CONFIGS[name]["num_hidden_layers"]
    return {1: [n], 2: [1, n - 1], 3: [1, 2, n - 3]}[num_stages]


def by_hand(folder: Path, cuts: list[int], codec: str, tokens: list[int]) -> list[int]:
    """The stages one after another, the prompt's rows packed between them, all others not."""
    checkpoint, start, stages = open_folder(folder), 0, list[StageModel]()
    for count in cuts:
        found = survey(checkpoint, start, start + count, "float32")
        stages.append(load_stage(checkpoint, found, start, start + count, "float32", lambda _done, _total: None))
        start += count
    caches, ids, said = [stage.make_caches() for stage in stages], list(tokens), list[int]()
    while len(said) < NUM:
        hidden = None
        for stage, cache in zip(stages, caches, strict=True):
            out = stage(mx.array([ids], dtype=mx.int32), cache, hidden, 1)
            hidden = None if stage.is_last else out
            if hidden is not None and not said:
                hidden = unpack(codec, pack(codec, hidden[0])[1], hidden.dtype)[None]
        said.append(int(mx.argmax(out[0, -1]).item()))
        ids = said[-1:]
    return said


@pytest.mark.parametrize(("name", "codec", "num_stages"), [road if road in USUAL else long(*road) for road in ROADS])
def test_prompts_are_packed_and_nothing_else(
    name: str, codec: str, num_stages: int, tiny_folder: Callable[..., Path]
) -> None:
    folder, cuts = tiny_folder(name), shape(name, num_stages)
    expected = by_hand(folder, cuts, codec, PROMPT)
    for budget in thorough((512, 3) if codec == INT8 else (16,), (512, 16, 1)):
        with pipeline(folder, cuts, token_budget=budget, codec=codec) as llm:
            assert greedy(llm, PROMPT) == expected, budget
            assert [stage.get("codec") for stage in llm.stats()["stages"]] == [*[codec] * (num_stages - 1), None]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", *PARTLY, long("qwen3")])
def test_something_is_rounded_and_fewer_bytes_are_sent(name: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder(name, **({"head_dim": 32} if name in PARTLY else {}))
    sizes, outcomes = {}, {}
    for codec in (NONE, *CODECS):
        with pipeline(folder, shape(name, 2), token_budget=16, codec=codec) as llm:
            outcomes[codec] = likely(llm, PROMPT)
            sizes[codec] = llm.stats()["stages"][0]["bytes_sent"]
    assert all(sizes[codec] < sizes[NONE] for codec in CODECS)
    assert all(outcomes[codec] != outcomes[NONE] for codec in ("fp8", INT8)), "nothing was rounded"
    off = {codec: abs(outcomes[codec] - outcomes[NONE]) for codec in CODECS}
    assert off[FP16] < 0.01, off
    assert off[INT8] < 0.3, off  # a small random model is anything but forgiving
    with pipeline(folder, shape(name, 1), token_budget=16) as llm:
        assert likely(llm, PROMPT) == outcomes[NONE]


@pytest.mark.parametrize("codec", CODECS)
def test_among_others_with_short_memory(
    codec: str, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests give up their KV, begin with others' prompts, and are computed again, answers included."""
    shorten_blocks(monkeypatch, 16)
    monkeypatch.setattr(kv_blocks, "_ROOM", 16)  # what a kept block is counted with
    folder, shared = tiny_folder("llama"), prompt(40, seed=3)
    prompts = [shared + prompt(n, seed=n) for n in (30, 9, 33, 24, 5, 48, 21, 50)]
    params = [splitinfer.SamplingParams(max_tokens=NUM, temperature=0.8, seed=i, ignore_eos=True) for i in range(8)]
    with pipeline(folder, [2, 2], codec=codec, prefix_cache=False) as llm:
        alone = [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
        per_token = max(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])
    with pipeline(folder, [2, 2], codec=codec, token_budget=24, kv_bytes=16 * 16 * per_token) as llm:
        for _ in range(2):
            assert [out.token_ids for out in llm.generate(prompts, params)] == alone
        assert llm.stats()["preemptions"] > 0
        assert llm.stats()["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("codec", "right"),
    [(FP16, 0.7), ("fp8", 0.7), (INT8, 0.7), (INT8, 0.0), long(FP16, 0.0), long("fp8", 0.0)],
)
def test_with_drafts(codec: str, right: float, tiny_folder: Callable[..., Path]) -> None:
    folder, replay = tiny_folder("llama"), Replay(160)
    with pipeline(folder, [1, 1, 2], codec=codec) as llm:
        expected = sampled(llm, PROMPT)
    replay.know(PROMPT, expected)
    replay.error = 1 - right
    with pipeline(folder, [1, 1, 2], codec=codec, drafter=lambda: replay, flight=Flight(2, 3, 2)) as llm:
        assert sampled(llm, PROMPT) == expected
        assert llm.stats()["speculation"]["sent"] > 0


@pytest.mark.parametrize("codec", CODECS)
def test_a_conversation_begins_with_its_prompts_not_with_its_answers(
    codec: str, tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer crossed exactly when it was generated; in the next prompt it is packed."""
    shorten_blocks(monkeypatch, 16)
    folder = tiny_folder("llama")
    disks = [Disk(tmp_path / name, 10**9) for name in "ab"]

    def talk(llm: LLM) -> tuple[list[list[int]], int]:
        said, answers = list(PROMPT), []
        for _ in range(3):
            answers.append(sampled(llm, said))
            said += answers[-1] + prompt(5, seed=len(said))
        return answers, llm.stats()["cached_tokens"]

    with pipeline(folder, [2, 2], codec=codec, prefix_cache=False) as llm:
        expected, _ = talk(llm)
    with pipeline(folder, [2, 2], codec=codec, disks=disks) as llm:
        answers, num_cached = talk(llm)
        assert answers == expected
        assert num_cached == len(PROMPT) + len(PROMPT) + NUM + 5
    with pipeline(folder, [2, 2], codec=codec, disks=disks) as llm:
        assert talk(llm)[0] == expected
        assert llm.stats()["fetched_tokens"] > 0


def test_kv_of_another_codec_is_not_seen_and_stays(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_blocks(monkeypatch, 16)
    folder = tiny_folder("llama")
    disks = [Disk(tmp_path / name, 10**9) for name in "ab"]
    outcomes = dict[str, list[int]]()
    for codec in (NONE, "fp8", INT8, NONE, "fp8", INT8):
        with pipeline(folder, [2, 2], codec=codec, disks=disks) as llm:
            found = sampled(llm, PROMPT)
            assert (llm.stats()["fetched_tokens"] > 0) == (codec in outcomes)
            assert outcomes.setdefault(codec, found) == found


def test_a_model_that_overflows_half(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fp16 cannot hold go as they are, and are counted."""
    folder = tiny_folder("llama")

    def huge(codec: str, rows: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
        fits, columns = pack(codec, rows)
        return fits & (mx.arange(rows.shape[0]) % 3 != 0), columns

    with pipeline(folder, [2, 2]) as llm:
        expected = greedy(llm, PROMPT)
    monkeypatch.setattr("splitinfer.models.hidden_states.pack", huge)
    with pipeline(folder, [2, 2], codec=FP16, token_budget=512) as llm:
        tokens = greedy(llm, PROMPT)
        assert len(tokens) == len(expected)
        assert llm.stats()["stages"][0]["rows_unfit"] == len(range(0, len(PROMPT), 3))


def test_half_of_a_model_in_sixteen_bits_is_none(
    tiny_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pipeline(tiny_folder("llama"), [2, 2], dtype="bfloat16", codec=FP16) as llm:
        assert llm.stats()["stages"][0]["codec"] == NONE
    assert "does not make hidden states of bfloat16 smaller" in caplog.text


@pytest.fixture(params=[(1e5, INT8), (1e12, NONE)])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A link of some bandwidth, and what suits it."""
    bandwidth, codec = request.param
    monkeypatch.setattr(link_codecs, "is_faster", _with(bandwidth, link_codecs.is_faster))
    return codec


def _with(bandwidth: float, is_faster: Callable[..., bool]) -> Callable[..., bool]:
    return lambda plain, packed, _measured, seconds: is_faster(plain, packed, bandwidth, seconds)


def test_auto_goes_by_the_link(link: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    with pipeline(folder, [1, 1, 2], codec=link) as llm:
        expected = sampled(llm, PROMPT)
    with pipeline(folder, [1, 1, 2], codec=AUTO) as llm:
        assert [stage.get("codec") for stage in llm.stats()["stages"]] == [link, link, None]
        assert sampled(llm, PROMPT) == expected
