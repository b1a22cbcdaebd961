"""Other cuts of a pipeline of real processes under eight streams, also with a worker that is killed while it loads its
new layers. No token changes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import local_workers
from stages import prompt

from splitinfer import SamplingParams
from splitinfer.errors import SplitinferError
from splitinfer.llm import LLM, Request, Settings
from splitinfer.wire.messages import Progress

TWO = [{"name": "a", "layers": 2}, {"name": "b", "layers": 2, "address": "local"}]
STREAMS = 8


def submit(llm: LLM) -> list[Request]:
    """Streams under way."""
    params = [
        SamplingParams(max_tokens=24 + 2 * i, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(STREAMS)
    ]
    return [llm.submit(prompt(9 + i), each) for i, each in enumerate(params)]


def tokens(requests: list[Request]) -> list[list[int]]:
    outputs = [request.result() for request in requests]
    assert [output.error for output in outputs] == [None] * STREAMS
    return [output.token_ids for output in outputs]


@pytest.mark.nightly
def test_eight_streams_under_other_cuts(tiny_folder: Callable[..., Path]):
    killed: list[psutil.Process] = []
    is_armed = False

    def notice(name: str, _progress: Progress) -> None:
        if is_armed and name == "b" and not killed:
            killed.append(local_workers()["b"])
            killed[0].kill()

    layout = {"model": str(tiny_folder("llama")), "stages": TWO}
    with LLM(layout, settings=Settings(prefix_cache=False), notice=notice) as llm:
        expected, requests = tokens(submit(llm)), submit(llm)
        events = [iter(request) for request in requests]  # one that nobody has any more would end its request
        for number, cut in enumerate(([1, 3], [3, 1])):
            next(events[number])
            assert llm.recut(cut) > 0
            assert llm.layout.cut == "-".join(map(str, cut))
        is_armed = True
        with suppress(SplitinferError):  # it was ready a moment before it died, or was not; either way
            llm.recut([2, 2])
        assert len(killed) == 1
        assert tokens(requests) == expected
        assert local_workers()["b"].pid != killed[0].pid, "another was started"
