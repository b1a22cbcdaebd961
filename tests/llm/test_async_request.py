"""The library for asyncio: what a loop reads is what a thread reads, and nobody waits for it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from campaigns.serving import quick_model
from stages import pipeline

from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import RequestError
from splitinfer.llm import LLM
from splitinfer.llm.request import waker
from tests.server.asgi import in_loop, until

TALE = "Once upon a time there was a king who had three sons"
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pipeline(quick_model(tmp_path_factory.mktemp("quick")), [1, 1]) as running:
        yield running


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, **changes})


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    return not stats["running"] and not stats["waiting"]


@pytest.mark.parametrize("stop", [(), ("three",)])
@in_loop
async def test_a_loop_reads_what_a_thread_reads(llm: LLM, stop: tuple[str, ...]):
    events = [event async for event in llm.astream(TALE, params(stop=stop))]
    whole = llm.generate(TALE, params(stop=stop))[0]
    assert [t for event in events for t in event.token_ids] == whole.token_ids
    assert "".join(event.text for event in events) == whole.text
    assert events[-1].finish_reason == whole.finish_reason


@in_loop
async def test_a_task_that_is_cancelled_aborts_its_request(llm: LLM):
    task = asyncio.create_task((await llm.asubmit(TALE, LONG)).result())
    await until(lambda: not is_idle(llm))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: is_idle(llm))


@in_loop
async def test_an_abort_is_a_result_and_until_then_the_next_is_told_when_there_is_room(llm: LLM):
    request = await llm.asubmit(TALE, LONG)
    await until(lambda: llm.stats()["running"] == 1)
    assert 1 <= llm.seconds_until_room() <= 60
    request.abort()
    assert (await request.result()).finish_reason == "abort"


@in_loop
async def test_leaving_early_aborts(llm: LLM):
    async with aclosing(llm.astream(TALE, LONG)) as events:
        async for _ in events:
            break
    await until(lambda: is_idle(llm))


@in_loop
async def test_a_wrong_argument_is_refused_at_once(llm: LLM):
    with pytest.raises(RequestError, match="timeout must be seconds over 0"):
        await llm.asubmit(TALE, timeout=-1)
    with pytest.raises(RequestError, match="the prompt is empty"):
        await llm.asubmit([])


def test_a_loop_that_is_closed_costs_the_engine_nothing(llm: LLM):
    async def main() -> Any:
        return await llm.asubmit(TALE, params(max_tokens=40, ignore_eos=True))

    request = asyncio.run(main())  # its loop is closed before the answer has come
    assert llm.generate(TALE, params())[0].finish_reason == "length"
    assert request.output.finish_reason is None
    request.abort()


@in_loop
async def test_a_loop_is_woken_once_for_all_that_comes_before_it_looks():
    loop, num_calls = asyncio.get_running_loop(), 0
    call_soon = loop.call_soon_threadsafe

    def count(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return call_soon(*given)

    loop.call_soon_threadsafe = count  # type: ignore[method-assign, assignment]
    for round_ in (1, 2):
        readers = [asyncio.Event() for _ in range(8)]
        thread = threading.Thread(target=lambda made: [wake() for wake in made], args=([*map(waker, readers)],))
        thread.start()
        thread.join()
        assert not any(reader.is_set() for reader in readers)
        await asyncio.gather(*(reader.wait() for reader in readers))
        assert num_calls == round_


@in_loop
async def test_nothing_is_missed_whenever_it_comes():
    """A thread wakes the reader at any moment of its turn; each event is seen."""
    reader, told = asyncio.Event(), 0
    wake = waker(reader)

    def tell() -> None:
        nonlocal told
        for _ in range(2000):
            told += 1
            wake()

    thread, seen = threading.Thread(target=tell), 0
    thread.start()
    while seen < 2000:
        await reader.wait()
        reader.clear()
        seen = told
    thread.join()
