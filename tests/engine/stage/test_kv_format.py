"""KV in few bits: other tokens than exact KV may give, but the same ones on every road."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from effort import long, thorough
from stages import pipeline, prompt, shorten_blocks, tokens_of

import splitinfer
from splitinfer.bench.speculation.replay import Replay
from splitinfer.core.speculation.flight import Flight
from splitinfer.demo import TARGET
from splitinfer.errors import ModelError
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM

PROMPT = prompt(70)
NUM = 24
CHANGES = {"llama": {"head_dim": 64}, "qwen3": {"head_dim": 32}, "qwen3_moe": {"head_dim": 64}}
PARTLY = {"gemma3_text": {"head_dim": 32}, "gpt_oss": {"head_dim": 64}, "qwen3_next": {"head_dim": 32}}


def sampled(llm: LLM, tokens: list[int]) -> list[int]:
    return tokens_of(llm, tokens, max_tokens=NUM, temperature=0.8, seed=5)


def shape(name: str, num_stages: int) -> list[int]:
    n = tiny.CONFIGS[name]["num_hidden_layers"]
    return {1: [n], 2: [1, n - 1], 3: [1, 2, n - 3]}[num_stages]


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [("llama", "k8v8"), ("llama", "k8v4"), ("qwen3", "k8v4"), ("qwen3_moe", "k8v8"),
     long("qwen3", "k8v8"), long("qwen3_moe", "k8v4")],
)  # fmt: skip
def test_every_road_gives_the_same(name: str, kv_format: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder(name, **CHANGES[name])
    outcomes = {}
    for num_stages, budget in [(1, 512), (2, 7), (3, 3), *thorough([], [(3, 1), (1, 16), (2, 16)])]:
        with pipeline(folder, shape(name, num_stages), token_budget=budget, kv_format=kv_format) as llm:
            outcomes[num_stages, budget] = sampled(llm, PROMPT)
    with pipeline(folder, shape(name, 2)) as llm:
        exact = sampled(llm, PROMPT)
    first = outcomes[1, 512]
    assert all(tokens == first for tokens in outcomes.values()), outcomes
    assert len(set(first)) > 5
    assert kv_format == "k8v8" or first != exact, "nothing was rounded"


@pytest.mark.parametrize("name", PARTLY)
def test_windows_and_states_stay_as_they_are(name: str, tiny_folder: Callable[..., Path]) -> None:
    """At equal chunking, for not all of these are exact at others."""
    folder = tiny_folder(name, **PARTLY[name])
    outcomes = []
    for num_stages in thorough((1, 3), (1, 2, 3)):
        with pipeline(folder, shape(name, num_stages), token_budget=16, kv_format="k8v8") as llm:
            outcomes.append(sampled(llm, PROMPT))
    assert all(tokens == outcomes[0] for tokens in outcomes)


@pytest.mark.parametrize(
    ("kv_format", "policy"),
    [("exact", "prefill_first"), ("exact", "watermark"), ("k8v8", "stall_free"), ("k8v4", "decode_first"),
     long("exact", "stall_free"), long("exact", "decode_first"),
     long("k8v8", "prefill_first"), long("k8v8", "watermark"), long("k8v8", "decode_first"),
     long("k8v4", "stall_free"), long("k8v4", "prefill_first"), long("k8v4", "watermark")],
)  # fmt: skip
def test_among_others_under_every_policy(
    kv_format: str, policy: str, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short memory, so that some give up theirs; an objective that no step keeps, then none; a dial that is turned."""
    shorten_blocks(monkeypatch, 16)
    folder = tiny_folder("llama", head_dim=64)
    prompts = [prompt(n, seed=n) for n in (70, 9, 33, 64, 5, 48, 21, 90)]
    num = thorough(14, NUM)
    params = [splitinfer.SamplingParams(max_tokens=num, temperature=0.8, seed=i, ignore_eos=True) for i in range(8)]
    with pipeline(folder, [2, 2], kv_format=kv_format) as llm:
        alone = [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
        per_token = max(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])
    kv_bytes = 20 * 16 * per_token
    with pipeline(
        folder,
        [2, 2],
        kv_format=kv_format,
        token_budget=24,
        kv_bytes=kv_bytes,
        policy=policy,
        kv_high=0.6,
        kv_low=0.3,
        min_dwell=2,
    ) as llm:
        for serving_options in (
            {},
            {"itl_slo_ms": 0.01},
            {"prefill_share": 0.1, "max_partial_prefills": 3, "itl_slo_ms": None},
        ):
            llm.tune(**serving_options)
            assert [out.token_ids for out in llm.generate(prompts, params)] == alone, serving_options


@pytest.mark.parametrize(("kv_format", "right"), [("k8v8", 0.7), ("k8v4", 0.0), ("k8v4", 0.7), long("k8v8", 0.0)])
def test_with_drafts(kv_format: str, right: float, tiny_folder: Callable[..., Path]) -> None:
    folder, replay = tiny_folder("llama", head_dim=64), Replay(160)
    with pipeline(folder, [1, 3], kv_format=kv_format) as llm:
        expected = sampled(llm, PROMPT)
    replay.know(PROMPT, expected)
    replay.error = 1 - right
    with pipeline(folder, [1, 3], kv_format=kv_format, drafter=lambda: replay, flight=Flight(2, 3, 2)) as llm:
        assert sampled(llm, PROMPT) == expected
        assert llm.stats()["speculation"]["sent"] > 0


@pytest.mark.parametrize("kv_format", ["k8v8", "k8v4"])
def test_kept_in_memory_and_on_disk(
    kv_format: str, tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_blocks(monkeypatch, 16)
    folder = tiny_folder("llama", head_dim=64)
    disks = [Disk(tmp_path / name, 10**9) for name in "ab"]
    with pipeline(folder, [2, 2], kv_format=kv_format) as llm:
        expected = sampled(llm, PROMPT)
    for cached in (0, 69):  # in the second life of all stages it comes from disk
        with pipeline(folder, [2, 2], disks=disks, kv_format=kv_format) as llm:
            first = llm.generate([PROMPT], splitinfer.SamplingParams(NUM, 0.8, seed=5, ignore_eos=True))[0]
            again = llm.generate([PROMPT], splitinfer.SamplingParams(NUM, 0.8, seed=5, ignore_eos=True))[0]
            assert first.token_ids == again.token_ids == expected
            assert first.num_cached_tokens == cached
            assert again.num_cached_tokens >= 64
    with pipeline(folder, [2, 2], disks=disks) as llm:
        other = llm.generate([PROMPT], splitinfer.SamplingParams(NUM, 0.8, seed=5, ignore_eos=True))[0]
        assert other.num_cached_tokens == 0, "KV of another format"


@pytest.mark.parametrize(("kv_format", "share"), [("k8v8", 0.2813), ("k8v4", 0.2188)])
def test_the_demo_model_takes_less_memory(kv_format: str, share: float) -> None:
    sizes = []
    for one in ("exact", kv_format):
        with pipeline(TARGET, [6, 6], kv_format=one) as llm:
            sizes.append(sum(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"]))
    assert sizes[1] / sizes[0] == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("deepseek_v3", {}, "deepseek_v3 cannot be k8v8: "),
        ("llama", {"head_dim": 16}, "its heads have 16 numbers, and 32 does not divide that"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    name: str, changes: dict[str, int], sentence: str, tiny_folder: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError, match=sentence), pipeline(tiny_folder(name, **changes), [4], kv_format="k8v8"):
        pass


def test_an_unknown_format_is_refused(tiny_folder: Callable[..., Path]) -> None:
    with (
        pytest.raises(ValueError, match="kv_format must be one of exact, k8v8, k8v4, not 'k2'"),
        pipeline(tiny_folder("llama"), [4], kv_format="k2"),
    ):
        pass


def test_half_precision_keeps_its_dtype(tiny_folder: Callable[..., Path]) -> None:
    folder, outcomes = tiny_folder("llama", head_dim=64), []
    for cut in ([4], [2, 2]):
        with pipeline(folder, cut, dtype="bfloat16", kv_format="k8v8", token_budget=16) as llm:
            outcomes.append(sampled(llm, PROMPT))
    assert outcomes[0] == outcomes[1]
