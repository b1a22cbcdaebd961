"""The page while another cut of the layers comes into force: other stages, and nothing of those before among theirs."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import stages

from splitinfer import SamplingParams
from splitinfer.llm import LLM
from splitinfer.server.page.feed import EVERY, Feed

PROMPT, PARAMS = stages.prompt(6), SamplingParams(max_tokens=12, ignore_eos=True)


class Looking:
    """A feed on a clock that is set by hand."""

    def __init__(self, llm: LLM) -> None:
        self.now, self.number = 100.0, 0
        self.feed = Feed(llm, "demo", lambda: False, lambda: self.now)

    def again(self) -> list[dict[str, Any]]:
        """The documents that have come since, half a second later."""
        self.now += EVERY
        found = self.feed.since(self.number)
        self.number = found[-1][0] if found else self.number
        return [document for _, document in found]


@pytest.mark.parametrize("cut", [[1, 3], [1, 1, 2]], ids=str)
def test_steps_from_before_are_not_among_the_figures(tiny_folder: Callable[..., Path], cut: list[int]):
    with ExitStack() as stack:
        addresses = [stack.enter_context(stages.worker("inproc")) for _ in range(2)]
        first, other = (stages.layout(tiny_folder("llama"), one, addresses[: len(one) - 1]) for one in ([2, 2], cut))
        llm = stack.enter_context(LLM(first))
        looking = Looking(llm)
        stack.enter_context(looking.feed.watched())
        looking.again()
        looking.again()
        llm.generate(PROMPT, PARAMS)
        (before,) = looking.again()
        assert all(before["tracks"])
        assert before["generated_per_second"] > 0
        llm.generate(PROMPT, PARAMS)  # nobody has taken these steps when the others come into force
        llm.recut(other)
        (after,) = looking.again()
        assert [stage["layers"][1] - stage["layers"][0] for stage in looking.feed.pipeline()["stages"]] == cut
        assert after["tracks"] == [[] for _ in cut]
        assert [len(after["stages"]), len(after["links"])] == [len(cut), len(cut) - 1]
        assert (after["computed_per_second"], after["generated_per_second"], after["void"]) == (0, 0, 0)
        assert all(stage["duty"] == 0 and not stage["gaps"] for stage in after["stages"])
        assert all(link == {"way_ms": None, "bytes_per_second": 0} for link in after["links"])
        late = [document for _, document in looking.feed.since(0)]
        assert [len(document["tracks"]) for document in late] == [len(cut)], "a late page gets none of those before"
        llm.generate(PROMPT, PARAMS)
        (later,) = looking.again()
        assert all(later["tracks"])
        assert later["generated_per_second"] == pytest.approx(12 / EVERY)
        assert all(stage["duty"] > 0 for stage in later["stages"])
