"""The library, on the demo model in two stages: what a caller sees."""

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stages import layout, pipeline, plain_greedy, prompt, tokens_of, worker

import splitinfer
from splitinfer.demo import TARGET
from splitinfer.engine.coordinator.open_requests import OpenRequests
from splitinfer.engine.coordinator.requests import Came, EventQueue
from splitinfer.errors import CannotFit, LayoutError, ModelError, QueueFull, RequestError, SplitinferError
from splitinfer.llm import LLM, Settings

TALE = "Once upon a time there was a king who had three sons"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pipeline(TARGET, [6, 6], token_budget=8) as running:
        yield running


@contextlib.contextmanager
def demo(**settings: Any) -> Iterator[LLM]:
    """The demo on two stages of this process."""
    with worker("inproc") as address, LLM(layout("demo", [6, 6], [address]), settings=Settings(**settings)) as running:
        yield running


def params(**changes: object) -> splitinfer.SamplingParams:
    return splitinfer.SamplingParams(**{"max_tokens": 24, **changes})  # type: ignore[arg-type]


def test_generate_takes_texts_and_token_ids(llm: LLM) -> None:
    tokens = llm.encode(TALE)
    outs = llm.generate([TALE, tokens, TALE], params())
    assert [out.token_ids for out in outs] == [plain_greedy(TARGET, tokens, 24)] * 3
    assert outs[0].num_prompt_tokens == len(tokens)
    assert outs[0].finish_reason == "length"
    assert len(outs[0].token_times) == 24
    assert outs[0].token_times == sorted(outs[0].token_times)
    assert llm.generate(tokens, params())[0].token_ids == outs[0].token_ids
    assert llm.generate([], params()) == []


def test_text_is_what_the_tokenizer_says(llm: LLM) -> None:
    out = llm.generate(TALE, params(max_tokens=40))[0]
    assert llm.tokenizer is not None
    assert out.text == llm.tokenizer.decode(out.token_ids)


def test_stream_gives_the_same_as_generate(llm: LLM) -> None:
    events = list(llm.stream(TALE, params()))
    whole = llm.generate(TALE, params())[0]
    assert [t for event in events for t in event.token_ids] == whole.token_ids
    assert "".join(event.text for event in events) == whole.text
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == "length"


def test_many_at_once_change_nothing(llm: LLM) -> None:
    tales = [TALE, "The wolf said", "In the forest", "A poor woman had", "The princess"]
    each = [params(max_tokens=12, temperature=t, seed=i) for i, t in enumerate((0.0, 0.7, 1.0, 0.0, 0.5))]
    together = llm.generate(tales, each)
    alone = [llm.generate(tale, p)[0] for tale, p in zip(tales, each, strict=True)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]


def test_a_seed_repeats_and_no_seed_does_not(llm: LLM) -> None:
    first, again = (tokens_of(llm, llm.encode(TALE), max_tokens=12, temperature=1.0, seed=4) for _ in range(2))
    assert first == again
    free = [tuple(tokens_of(llm, llm.encode(TALE), max_tokens=12, temperature=1.0)) for _ in range(3)]
    assert len(set(free)) == 3


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate(TALE, params(max_tokens=60))[0].text
    middle = len(whole) // 2
    stop = whole[middle : middle + 5]  # lies across tokens
    out = llm.generate(TALE, params(max_tokens=60, stop=(stop, "never to be found")))[0]
    assert out.finish_reason == "stop"
    assert out.text == whole[: whole.index(stop)]
    assert len(out.token_ids) < 60


def test_stop_token_ends_the_request(llm: LLM) -> None:
    tokens = llm.generate(TALE, params())[0].token_ids
    out = llm.generate(TALE, params(stop_token_ids=(tokens[9],)))[0]
    assert out.token_ids == tokens[: tokens.index(tokens[9]) + 1]
    assert out.finish_reason == "stop"


def test_logprobs(llm: LLM) -> None:
    out = llm.generate(TALE, params(logprobs=3))[0]
    assert out.logprobs is not None
    assert [p.token_id for p in out.logprobs] == out.token_ids
    for p in out.logprobs:
        assert p.top[0] == (p.token_id, p.logprob)  # greedy
        assert [value for _, value in p.top] == sorted((value for _, value in p.top), reverse=True)
        assert sum(math.exp(value) for _, value in p.top) <= 1.0 + 1e-5
    assert llm.generate(TALE, params())[0].logprobs is None


def test_repetition_penalty_is_felt(llm: LLM) -> None:
    plain, penalized = (
        tokens_of(llm, llm.encode(TALE), max_tokens=60, repetition_penalty=penalty) for penalty in (1.0, 1.5)
    )
    assert len(set(penalized)) > len(set(plain))


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_of_the_answer_are_felt(llm: LLM, penalty: str) -> None:
    plain, penalized = (tokens_of(llm, llm.encode(TALE), max_tokens=60, **{penalty: value}) for value in (0.0, 2.0))
    assert len(set(penalized)) > len(set(plain))


def test_a_bias_forbids_and_forces(llm: LLM) -> None:
    (first, *_) = tokens_of(llm, llm.encode(TALE), max_tokens=20)
    assert first not in tokens_of(llm, llm.encode(TALE), max_tokens=20, logit_bias={first: -100})
    assert set(tokens_of(llm, llm.encode(TALE), max_tokens=20, logit_bias={77: 100})) == {77}


def test_a_bias_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"logit_bias has token id 4000000, but the model's vocabulary is [\d,]+"):
        llm.submit(TALE, params(logit_bias={4_000_000: 1}))


def test_abort_ends_with_what_there_is(llm: LLM) -> None:
    request = llm.submit(TALE, params(max_tokens=2000, ignore_eos=True))
    events = iter(request)
    first = next(events)
    request.abort()
    rest = list(events)
    assert rest[-1].finish_reason == "abort"
    assert len(first.token_ids) + sum(len(e.token_ids) for e in rest) < 2000
    assert llm.generate(TALE, params())[0].token_ids == plain_greedy(TARGET, llm.encode(TALE), 24)


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    before = llm.stats()["finished"].get("abort", 0)
    for _ in llm.stream(TALE, params(max_tokens=2000, ignore_eos=True)):
        break
    assert llm.generate(TALE, params())[0].finish_reason == "length"
    assert llm.stats()["finished"]["abort"] == before + 1


def test_a_next_turn_computes_only_what_is_new_until_the_session_is_forgotten(llm: LLM) -> None:
    start = llm.encode("A turn that nobody else takes, ")
    first = llm.submit(start, params(), session="s").result()
    so_far = start + first.token_ids
    turn = [*so_far, *llm.encode(" and then")]
    second = llm.submit(turn, params(), session="s").result()
    assert second.num_cached_tokens == len(so_far) - 1  # the last token's KV was never needed
    edited = [*turn[:20], *llm.encode(" but the queen")]
    third = llm.submit(edited, params(), session="t").result()
    assert third.num_cached_tokens == 20
    llm.forget("s")
    assert llm.submit(turn, params(), session="s").result().num_cached_tokens == 20  # that is the other's, too
    for session in "st":
        llm.forget(session)
    assert llm.submit(turn, params(), session="s").result().num_cached_tokens <= 1  # another tale may begin with "A"
    llm.forget("s")


def test_stats_are_plain_numbers(llm: LLM) -> None:
    llm.generate(TALE, params())
    stats = llm.stats()
    assert [stage["name"] for stage in stats["stages"]] == ["s0", "s1"]
    assert all(0 < stage["busy_percent"] <= 101 for stage in stats["stages"])
    # Half of the demo model in float32, and the (tied) embedding on both stages.
    assert all(9e6 < stage["weight_bytes"] < 13e6 for stage in stats["stages"])
    assert stats["bytes_per_token"] == 192 * 4


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ([], "the prompt is empty"),
        ([5] * 5000, "the prompt has 5,000 tokens, but the context is 4,096, the answer's first token included$"),
        ([5, 99999], "token id 99999 is not in the model's vocabulary of 2,048"),
        ([-1], "token id -1 is not"),
    ],
)
def test_prompts_that_cannot_be(llm: LLM, bad: list[int], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.submit(bad)


def test_the_context_ends_an_answer(tiny_folder: Callable[..., Path]) -> None:
    with pipeline(tiny_folder("llama"), [2, 2]) as llm:
        out = llm.generate([prompt(500)], params(max_tokens=100, ignore_eos=True))[0]
        assert (len(out.token_ids), out.finish_reason) == (12, "length")


def test_layouts_that_cannot_be(tmp_path: Path, tiny_folder: Callable[..., Path]) -> None:
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


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    """One block of 256 tokens takes 786 kB on 6 of the demo model's layers."""
    with demo(kv_bytes=10**6) as llm:
        with pytest.raises(
            RequestError, match=r"answer of 303 tokens can never fit: .* 1.57 MB of KV on stage .* 1 MB"
        ):
            llm.submit([5, 9, 13], params(max_tokens=300))
        assert len(llm.generate([5, 9, 13], params(max_tokens=20, ignore_eos=True))[0].token_ids) == 20


def test_more_requests_than_may_wait_are_refused() -> None:
    """All 3,000 at once: each is taken or told so, and those taken are answered."""
    taken, refused = [], list[str]()
    with demo(max_waiting=50, max_running=4) as llm:
        for i in range(3_000):
            try:
                taken.append(llm.submit([5, 9, 13 + i % 7], params(max_tokens=1)))
            except QueueFull as error:
                refused.append(str(error))
        assert len(taken) >= 50
        assert len(taken) + len(refused) == 3_000
        assert refused[0] == "50 requests are waiting already, which is the most; try again later"
        assert all(len(request.result().token_ids) == 1 for request in taken)


def test_a_request_whose_time_is_over_is_ended() -> None:
    with demo() as llm:
        late = llm.submit(TALE, params(max_tokens=4000, ignore_eos=True), timeout=0.3)
        output = late.result()
        assert (output.finish_reason, output.error) == ("abort", "it timed out")
        assert llm.generate(TALE, params(max_tokens=3))[0].finish_reason == "length"


def test_a_closed_llm_says_so() -> None:
    with worker("inproc") as address:
        llm = LLM(layout("demo", [6, 6], [address]))
        pending = llm.submit(TALE, params(max_tokens=3000, ignore_eos=True))
        llm.close()
        assert pending.result().finish_reason == "abort"
        with pytest.raises(SplitinferError, match="closed"):
            llm.submit(TALE)
        llm.close()


def test_the_name_of_a_local_worker_is_enough() -> None:
    with LLM("demo.yaml") as llm:
        assert tokens_of(llm, llm.encode(TALE), max_tokens=8) == plain_greedy(TARGET, llm.encode(TALE), 8)


@pytest.mark.parametrize(
    "handling", [{"priority": "high"}, {"session": ["a"]}, {"timeout": math.nan}, {"timeout": -1.0}, {"priority": True}]
)
def test_odd_handling_is_refused_before_anybody_is_hurt(llm: LLM, handling: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(handling))} must be"):
        llm.submit(TALE, params(), **handling)  # type: ignore[arg-type]
    assert len(llm.generate(TALE, params(max_tokens=2))[0].token_ids) == 2


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "seed", "logprobs"])
def test_counts_are_whole_numbers(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be a whole number, not 2.5"):
        params(**{field: 2.5})


def test_a_request_that_nobody_has_seen_yet_ends_with_the_engine() -> None:
    """Handed in while the loop is busy with its last step; nothing may hang, neither its reader nor the next."""
    for _ in range(2):
        llm = LLM(layout("demo", [12], []))
        requests = [llm.submit(TALE, params(max_tokens=500, ignore_eos=True)) for _ in range(3)]
        llm._engine._inbox.put(llm._engine._raise_stop)
        with contextlib.suppress(SplitinferError):
            while True:
                requests.append(llm.submit(TALE, params()))
        assert {request.result().finish_reason for request in requests} <= {"abort", "length", "stop"}
        llm.close()


def test_more_prompts_than_may_wait_are_all_answered() -> None:
    with demo(max_waiting=5, max_running=2) as llm:
        outputs = llm.generate([[5, 9, i] for i in range(40)], params(max_tokens=1))
        assert [len(output.token_ids) for output in outputs] == [1] * 40


def test_a_stream_that_is_dropped_unread_is_aborted(llm: LLM) -> None:
    before = llm.stats()["finished"].get("abort", 0)
    stream = llm.stream(TALE, params(max_tokens=2000, ignore_eos=True))
    del stream
    llm.generate(TALE, params(max_tokens=2))
    assert llm.stats()["finished"]["abort"] == before + 1


def test_dials_can_be_turned_while_requests_are_under_way(tiny_folder: Callable[..., Path]) -> None:
    with pipeline(tiny_folder("llama"), [2, 2], policy="watermark", token_budget=16) as llm:
        params = splitinfer.SamplingParams(max_tokens=40, ignore_eos=True)
        alone = llm.generate([prompt(50)], params)[0].token_ids
        requests = [llm.submit(prompt(50), params) for _ in range(4)]
        llm.tune(policy="prefill_first", token_budget=7)
        llm.tune(itl_slo_ms=1.0, policy=None, max_running=2)
        assert [request.result().token_ids for request in requests] == [alone] * 4
        stats = llm.stats()
        assert (stats["policy"], stats["token_budget"], stats["max_running"]) == ("stall_free", 7, 2)
        assert requests[0].output.queue_seconds is not None
        assert 0 <= requests[0].output.queue_seconds < requests[0].output.token_times[0]
        for wrong, sentence in (
            ({"polcy": "x"}, "there is no option 'polcy'; there are policy, prefill_share"),
            ({"prefill_share": 3}, "prefill_share must be a number from 0.01 to 1, not 3"),
        ):
            with pytest.raises(splitinfer.SplitinferError, match=sentence):
                llm.tune(**wrong)


def test_a_layouts_dials_hold_unless_the_settings_say_otherwise(tiny_folder: Callable[..., Path]) -> None:
    stages = [{"name": "all", "layers": 4}]
    layout = {
        "model": str(tiny_folder("llama")), "stages": stages, "serving": {"policy": "decode_first", "max_running": 3}
    }  # fmt: skip
    with splitinfer.LLM(layout, settings=splitinfer.Settings(max_running=5)) as llm:
        stats = llm.stats()
        assert (stats["policy"], stats["max_running"]) == ("decode_first", 5)


# -- what a model's makers recommend -------------------------------------------------------------


def test_the_models_recommendation_is_offered_and_not_taken(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    (folder / "generation_config.json").write_text('{"temperature": 5.0, "eos_token_id": [3, 4]}')
    with LLM({"model": str(folder), "stages": [{"name": "all", "layers": 4}]}) as llm:
        assert llm.default_sampling == splitinfer.SamplingParams(temperature=5.0)
        plain, greedy = (llm.generate([5, 9], said)[0] for said in (None, splitinfer.SamplingParams()))
        assert plain.token_ids == greedy.token_ids
        assert llm._prompts.end_tokens(splitinfer.SamplingParams()) == {3, 4}


def test_the_largest_values_that_parameters_take_reach_every_stage(llm: LLM) -> None:
    largest = params(max_tokens=2**63 - 1, top_k=2**63 - 1, temperature=1.0, stop_token_ids=(2**63 - 1,))
    request = llm.submit(TALE, largest)
    next(iter(request))
    request.abort()
    assert llm.generate(TALE, params(max_tokens=2))[0].finish_reason == "length"


@pytest.mark.parametrize("ending", ["length", "stop", "abort"])
def test_an_answer_is_counted_before_its_reader_is_told(llm: LLM, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the last event may ask for figures at once."""
    seen: list[dict[str, int]] = []
    put = EventQueue.put

    def put_and_look(queue: EventQueue, item: Came) -> None:
        ended = item.reason if hasattr(item, "reason") else item.finish_reason
        if ended is not None:
            seen.append(llm.stats()["finished"])
        put(queue, item)

    monkeypatch.setattr(EventQueue, "put", put_and_look)
    stop = [llm.generate(TALE, params())[0].text[4:9]] if ending == "stop" else []
    seen.clear()
    before = llm.stats()["finished"].get(ending, 0)
    request = llm.submit(TALE, params(stop=stop, max_tokens=200 if ending == "abort" else 24))
    if ending == "abort":
        request.abort()
    assert request.result().finish_reason == ending
    assert [one.get(ending, 0) - before for one in seen] == [1]


def test_a_step_is_counted_before_the_readers_of_its_tokens_are_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who reads statistics with a token divides by one token more than there were steps."""
    tell, totals, seen = OpenRequests.tell, llm._engine.figures.totals, list[int]()

    def tells(requests: OpenRequests) -> None:
        llm._engine.figures.count()
        seen.append(totals.stages[0].steps - totals.generated_tokens)
        tell(requests)

    llm._engine.figures.count()
    before = totals.stages[0].steps - totals.generated_tokens
    monkeypatch.setattr(OpenRequests, "tell", tells)
    llm.generate([5, 9, 13], params(ignore_eos=True))
    assert len(seen) >= 24
    assert min(seen) >= before
