"""Whether an answer is right, where no machine here holds the whole model, and plain mlx-lm cannot be asked
(``probes.plain``). Then the pipeline answers again, in chunks of another
size (masks, positions and KV are others) and in another cut (another machine computes a layer). Where two readings
part, the margin between the two likeliest tokens says whether rounding can be the reason; what rounding moves is seen
on the shortest prompt, so a fault that long and short prompts share may pass for it.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from splitinfer.bench.parts import ANSWER
from splitinfer.console import say
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.loop.requests import RequestOutput
from splitinfer.errors import SplitinferError
from splitinfer.llm import LLM
from splitinfer.probes.plain import RIGHT, ROUNDING, TIMES_MOVED, WRONG

Prompts = Mapping[str, Sequence[int]]
Verdicts = list[dict[str, Any]]

_PARAMS = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=2)


def reread(
    first: Sequence[int], again: Sequence[int], margins: Sequence[float], moved: float, how: str
) -> dict[str, Any]:
    """What a second answer means. ``margins``: of the first answer, between the two likeliest tokens; ``moved``: how
    far rounding moves log probabilities; ``how``: what was otherwise."""
    at = parting(first, again[: len(first)])
    if at is None:
        return {"verdict": RIGHT, "said": f"the same {len(first)} tokens {how}"}
    said = f"token {at + 1} is another {how}; the two likeliest were {margins[at]:.2g} apart"
    is_near = margins[at] <= TIMES_MOVED * moved
    return {"verdict": ROUNDING if is_near else WRONG, "said": said, "at": at + 1, "gap": margins[at]}


def worst(verdicts: Sequence[Mapping[str, Any]]) -> str | None:
    """The verdict on all answers of a system; ``None`` if there was none."""
    found = {each["verdict"] for each in verdicts}
    return next((word for word in (WRONG, ROUNDING, RIGHT) if word in found), None)


def parting(wanted: Sequence[int], given: Sequence[int]) -> int | None:
    """The first place, counted from 0, at which two answers differ; ``None`` if they are the same.

    >>> parting([5, 6, 7], [5, 8, 7]), parting([5, 6], [5]), parting([5, 6], [5, 6])
    (1, 1, None)
    """
    pairs = zip_longest(wanted, given)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


def read_again(llm: LLM, prompts: Prompts) -> tuple[Verdicts, list[dict[str, str]]]:
    """The pipeline's answers against its own in other chunks and in another cut; what could not be tried. ``llm`` keeps
    no KV between requests, and is in the other cut afterwards."""
    usual = llm.token_budget
    once = _answers(llm, prompts)
    llm.tune(token_budget=max(8, usual // 2 - 1))
    found = _compared(prompts, once, _answers(llm, prompts), "in other chunks")
    llm.tune(token_budget=usual)
    cut = other_cut([stage.num_layers for stage in llm.layout.stages])
    if cut is None:
        return found, [{"what": "answers in another cut", "why": "no layer can move to another stage"}]
    name = " + ".join(map(str, cut))
    say(f"answering again in the cut {name}")
    try:
        llm.recut(cut)
        return found + _compared(prompts, once, _answers(llm, prompts), f"in the cut {name}"), []
    except SplitinferError as error:
        return found, [{"what": f"answers in the cut {name}", "why": str(error)}]


def other_cut(layers: Sequence[int]) -> list[int] | None:
    """The numbers of layers of the stages after one has moved: from the stage with most to a neighbour.

    >>> other_cut([4, 2]), other_cut([2, 2, 5]), other_cut([1, 1]), other_cut([4])
    ([3, 3], [2, 3, 4], None, None)
    """
    giver = max(range(len(layers)), key=layers.__getitem__)
    if len(layers) == 1 or layers[giver] == 1:
        return None
    taker = giver - 1 if giver else 1
    return [count + (at == taker) - (at == giver) for at, count in enumerate(layers)]


def _answers(llm: LLM, prompts: Prompts) -> list[RequestOutput]:
    return [llm.generate([list(prompt)], _PARAMS)[0] for prompt in prompts.values()]


def _compared(prompts: Prompts, once: Sequence[RequestOutput], again: Sequence[RequestOutput], how: str) -> Verdicts:
    """The shortest prompt says what rounding moves: a fault that only long ones show must not excuse itself."""
    moved = min(zip(map(len, prompts.values()), map(_moved, once, again), strict=True), default=(0, 0.0))[1]
    found = Verdicts()
    for (name, prompt), first, second in zip(prompts.items(), once, again, strict=True):
        margins = [each.top[0][1] - each.top[1][1] for each in first.logprobs or []]
        said = reread(first.token_ids, second.token_ids, margins, moved, how)
        found.append({"part": name, "prompt_tokens": len(prompt), **said})
    return found


def _moved(once: RequestOutput, again: RequestOutput) -> float:
    """How far the log probabilities of the likeliest tokens have moved, up to where the answers part: behind that they
    follow other texts."""
    at = parting(once.token_ids, again.token_ids)
    same = slice(None if at is None else at + 1)
    pairs = zip((once.logprobs or [])[same], (again.logprobs or [])[same], strict=False)
    return max(
        (abs(a[1] - b[1]) for one, other in pairs for a in one.top for b in other.top if a[0] == b[0]), default=0.0
    )
