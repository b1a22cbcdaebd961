"""Other cuts of a pipeline of real processes under eight streams: asked for here, by another process, and with a worker
that is killed while it loads its new layers. No token changes."""

import json
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
from processes import Running
from stages import prompt

from splitinfer import SamplingParams
from splitinfer.errors import SplitinferError
from splitinfer.llm import LLM, Request, Settings
from splitinfer.llm.live_socket import LiveSocket
from splitinfer.wire.messages import Progress

TWO = [{"name": "a", "layers": 2}, {"name": "b", "layers": 2, "address": "local"}]
STREAMS, SECONDS = 8, 120.0


def worker() -> psutil.Process:
    """The local worker. One that was killed may still be listed: the system has not ended it, or nobody has asked."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    (found,) = (child for child in living if "--name" in child.cmdline())
    return found


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


def test_eight_streams_under_other_cuts(tiny_folder: Callable[..., Path]):
    killed: list[psutil.Process] = []
    is_armed = False

    def notice(name: str, _progress: Progress) -> None:
        if is_armed and name == "b" and not killed:
            killed.append(worker())
            killed[0].kill()

    layout = {"model": str(tiny_folder("llama")), "stages": TWO}
    with LLM(layout, settings=Settings(prefix_cache=False), notice=notice) as llm, closing(LiveSocket(llm)):
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
        assert worker().pid != killed[0].pid, "another was started"
        requests = submit(llm)
        asking = Running("plan", "--live", "--apply", "--for", "throughput", "--json")
        try:
            assert asking.wait(SECONDS) == 0, asking.err
            said = json.loads(asking.out)
        finally:
            asking.end()
        assert tokens(requests) == expected
        assert said["best"] == llm.layout.cut
