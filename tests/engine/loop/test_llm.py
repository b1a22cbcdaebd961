"""The library, on the demo model in two stages: what a caller sees."""

import math
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import stages
from engine.door import SECONDS, Open, ask
from stages import layout, plain_greedy, worker
from tiny import Folder

import splitinfer
from splitinfer.demo import TARGET
from splitinfer.errors import CannotFit, ConfigError, LayoutError, ModelError, QueueFull, RequestError, SplitinferError
from splitinfer.llm import LLM, Settings

TALE = "Once upon a time there was a king who had three sons"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with stages.pipeline(TARGET, [6, 6], token_budget=8) as running:
        yield running


def params(**changes: Any) -> splitinfer.SamplingParams:
    return splitinfer.SamplingParams(**{"max_tokens": 16, **changes})


def test_texts_token_ids_and_streams_give_the_same(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(TALE)
    outs = llm.generate([TALE, tokens], params())
    assert [out.token_ids for out in outs] == [plain_greedy(TARGET, tokens, 16)] * 2
    assert (outs[0].num_prompt_tokens, outs[0].finish_reason) == (len(tokens), "length")
    assert outs[0].token_times == sorted(outs[0].token_times)
    assert outs[0].text == llm.tokenizer.decode(outs[0].token_ids)
    events = list(llm.stream(TALE, params()))
    assert [t for event in events for t in event.token_ids] == outs[0].token_ids
    assert "".join(event.text for event in events) == outs[0].text
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert llm.generate([], params()) == []
    free = llm.generate([TALE] * 3, params(max_tokens=12, temperature=1.0))
    assert len({tuple(out.token_ids) for out in free}) == 3, "without a seed"


def test_stop_strings_and_stop_tokens_end_an_answer(llm: LLM) -> None:
    whole = llm.generate(TALE, params())[0]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 5]  # lies across tokens
    out = llm.generate(TALE, params(stop=(stop, "never to be found")))[0]
    assert (out.finish_reason, out.text) == ("stop", whole.text[: whole.text.index(stop)])
    assert len(out.token_ids) < 16
    out = llm.generate(TALE, params(stop_token_ids=(whole.token_ids[9],)))[0]
    assert out.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[9]) + 1]
    assert out.finish_reason == "stop"


def test_whoever_leaves_aborts(llm: LLM) -> None:
    """By saying so, by leaving a stream, or by dropping one unread."""
    long = params(max_tokens=2000, ignore_eos=True)
    before = llm.stats()["finished"].get("abort", 0)
    request = llm.submit(TALE, long)
    events = iter(request)
    next(events)
    request.abort()
    assert list(events)[-1].finish_reason == "abort"
    assert len(request.output.token_ids) < 2000
    for _ in llm.stream(TALE, long):
        break
    stream = llm.stream(TALE, long)
    del stream
    assert llm.generate(TALE, params())[0].finish_reason == "length"
    assert llm.stats()["finished"]["abort"] == before + 3


def test_a_next_turn_computes_only_what_is_new_until_the_session_is_forgotten(llm: LLM) -> None:
    start = llm.tokenizer.encode("A turn that nobody else takes, ")

    def cached(tokens: list[int], session: str) -> int:
        return llm.submit(tokens, params(max_tokens=1), session=session).result().num_cached_tokens

    so_far = start + llm.submit(start, params(), session="s").result().token_ids
    turn = [*so_far, *llm.tokenizer.encode(" and then")]
    assert cached(turn, "s") == len(so_far) - 1  # the last token's KV was never needed
    assert cached([*turn[:20], *llm.tokenizer.encode(" but the queen")], "t") == 20
    llm.forget("s")
    assert cached(turn, "s") == 20, "that is the other's, too"
    for session in "st":
        llm.forget(session)
    assert cached(turn, "s") <= 1  # another tale may begin with "A"
    llm.forget("s")


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ([], {}, "the prompt is empty"),
        ([5] * 5000, {}, "the prompt has 5,000 tokens; at most 4,095 fit$"),
        ([5, 99999], {}, "token id 99999 is not in the model's vocabulary of 2,048"),
        ([-1], {}, "token id -1 is not"),
        (TALE, {"params": params(logit_bias={4_000_000: 1})}, r"logit_bias has token id 4000000, but .* is [\d,]+"),
        (TALE, {"priority": "high"}, "priority must be"),
        (TALE, {"priority": True}, "priority must be"),
        (TALE, {"session": ["a"]}, "session must be"),
        (TALE, {"timeout": math.nan}, "timeout must be"),
        (TALE, {"timeout": -1.0}, "timeout must be"),
    ],
)
def test_requests_that_cannot_be_are_refused(llm: LLM, prompt: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.submit(prompt, **options)


def test_the_largest_values_that_parameters_take_reach_every_stage(llm: LLM) -> None:
    largest = params(max_tokens=2**63 - 1, top_k=2**63 - 1, temperature=1.0, stop_token_ids=(2_047,))
    request = llm.submit(TALE, largest)
    next(iter(request))
    request.abort()
    assert llm.generate(TALE, params(max_tokens=2))[0].finish_reason == "length"


def test_layouts_that_cannot_be(tmp_path: Path, tiny_folder: Folder) -> None:
    with pytest.raises(LayoutError, match=r"holds 11 layers \(5 \+ 6\), but the model has 12"):
        LLM(layout("demo", [5, 6], ["local"]))
    with pytest.raises(LayoutError, match="names no model"):
        LLM({"stages": [{"name": "a", "layers": 12}]})
    with pytest.raises(ModelError, match=r"contains no config\.json"):
        LLM(layout(tmp_path, [12], []))
    with pytest.raises(LayoutError, match="does not have the vocabulary"):
        LLM({**layout("demo", [12], []), "draft": str(tiny_folder("llama"))})


def test_what_cannot_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitinfer.models.memory.free_bytes", lambda: 10**7)
    with pytest.raises(CannotFit, match=r"stage s0 .* needs 20.5 MB of weights and .* 10 MB free"):
        LLM(layout("demo", [12], []))


def test_a_request_that_can_never_fit_is_refused_with_numbers(pipeline: Open) -> None:
    with pipeline("llama", [2, 2], kv_bytes=200_000, context=400) as there:
        with pytest.raises(RequestError, match=r"answer of 303 tokens can never fit: .* kB of KV on stage .* 200 kB"):
            there.submit(ask(3, max_tokens=300))
        there.answers(ask(3, max_tokens=20))


def test_more_requests_than_may_wait_are_refused(pipeline: Open) -> None:
    """Each is taken or told so, and those taken are answered; ``generate`` waits for room."""
    refused = list[str]()
    with pipeline("llama", [2, 2], max_waiting=20, max_running=4) as there:
        for i in range(500):
            try:
                there.submit(ask(3 + i % 7, max_tokens=1))
            except QueueFull as error:
                refused.append(str(error))
        assert set(refused) == {"20 requests are waiting already, which is the most; try again later"}
        assert len(there.asked) + len(refused) == 500
        there.finish()
        outputs = there.llm.generate([[5, 9, i] for i in range(60)], params(max_tokens=1, ignore_eos=True))
        assert [len(output.token_ids) for output in outputs] == [1] * 60


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"prompt_logprobs": 0}, {"temperature": 1.0}], ids=str)
def test_numbers_that_overflow_end_a_request_with_a_sentence(options: dict[str, Any], wide: LLM) -> None:
    """All weights are finite in float16, and what they give is not. Nothing of it is an answer."""
    (found,) = wide.generate([stages.prompt(8)], params(**options))
    assert (found.finish_reason, found.text, found.token_ids) == ("error", "", [])
    assert found.error == "the model's numbers overflowed (NaN); use dtype bfloat16 or float32"


@pytest.fixture(scope="module")
def wide(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("wide") / "wide"
    shutil.copytree(tiny_folder("llama"), folder)
    for path in folder.glob("*.safetensors"):
        weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        grown = {name: array * 1e5 if "layers.2.mlp.down" in name else array for name, array in weights.items()}
        mx.save_safetensors(str(path), {name: mx.clip(array, -6e4, 6e4) for name, array in grown.items()})
    with stages.pipeline(folder, [2, 2], dtype="float16") as running:
        yield running


def test_the_context_and_the_time_end_an_answer(pipeline: Open) -> None:
    with pipeline("llama", [2, 2]) as there:
        (output,) = there.llm.generate([[5] * 500], params(max_tokens=100, ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (12, "length")
        late = there.llm.submit([5] * 3, params(max_tokens=500, ignore_eos=True), timeout=0.01).result()
        assert (late.finish_reason, late.error) == ("abort", "it timed out")


def test_a_closed_llm_says_so_to_everybody() -> None:
    """Also to requests that are handed in while the loop ends."""
    with worker("inproc") as address:
        llm = LLM(layout("demo", [6, 6], [address]))
        requests = [llm.submit(TALE, params(max_tokens=3000, ignore_eos=True)) for _ in range(3)]
        closing = threading.Thread(target=llm.close)
        closing.start()

        def go_on() -> None:
            while True:
                requests.append(llm.submit(TALE, params()))
                time.sleep(0.0005)

        with pytest.raises(SplitinferError, match="closed"):
            go_on()
        assert {request.result().finish_reason for request in requests} <= {"abort", "length", "stop"}
        closing.join(SECONDS)
        llm.close()


def test_dials_can_be_turned_while_requests_are_under_way(pipeline: Open) -> None:
    with pipeline("llama", [2, 2], policy="watermark", token_budget=16) as there:
        requests = there.submit(*[ask(50, max_tokens=40)] * 4)
        there.llm.tune(policy="prefill_first", token_budget=7)
        there.llm.tune(itl_slo_ms=1.0, policy=None, max_running=2)
        there.finish()
        stats = there.stats
        assert (stats["policy"], stats["token_budget"], stats["max_running"]) == ("stall_free", 7, 2)
        assert requests[0].output.queue_seconds is not None
        assert 0 <= requests[0].output.queue_seconds < requests[0].output.token_times[0]
        with pytest.raises(ConfigError, match="there is no option 'polcy'; there are policy, prefill_share"):
            there.llm.tune(polcy="x")


def test_a_layouts_dials_and_a_models_recommendation(tiny_folder: Folder, tmp_path: Path) -> None:
    """The dials hold unless the settings say otherwise; the recommendation is offered and not taken, but for the
    tokens that end an answer."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    serving = {"policy": "decode_first", "max_running": 3}
    described = {"model": str(folder), "stages": [{"name": "all", "layers": 4}], "serving": serving}
    with LLM(described) as llm:
        assert llm.default_sampling == splitinfer.SamplingParams()
        greedy = llm.generate([5, 9], params(ignore_eos=True))[0].token_ids
    end = greedy[3]
    (folder / "generation_config.json").write_text(f'{{"temperature": 1.5, "eos_token_id": [{end}]}}')
    with LLM(described, settings=Settings(max_running=5)) as llm:
        stats = llm.stats()
        assert (stats["policy"], stats["max_running"]) == ("decode_first", 5)
        assert llm.default_sampling == splitinfer.SamplingParams(temperature=1.5)
        output = llm.generate([5, 9])[0]
        assert (output.token_ids, output.finish_reason) == (greedy[: greedy.index(end) + 1], "stop")
