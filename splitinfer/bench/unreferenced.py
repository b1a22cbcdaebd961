"""Whether answers are right where no machine holds the whole model, so that plain mlx-lm cannot be asked.

Three things can still be known:

    other chunks     the pipeline reads its prompts again in chunks of another size: masks, positions and KV are others
    another cut      one layer moves from one stage to its neighbour: another machine computes it, other rows cross
    first layers     as many layers as the first stage has, under the model's own head, are a model of their own that
                     this machine does hold: it answers, and plain mlx-lm judges its answers

Where two readings part, the margin between the two likeliest tokens says whether rounding can be the reason; what
rounding moves is seen on the shortest prompt. So a fault that long and short prompts share may pass for rounding, and
only the first layers, which mlx-lm judges, tell it. What cannot be done (one stage, no room for the other cut) is
named, and nothing is said about it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitinfer.bench.judge import reread, verdict
from splitinfer.bench.mlx_lm import PlainMlxLm
from splitinfer.bench.parts import ANSWER
from splitinfer.bench.printing import say
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.coordinator.requests import RequestOutput
from splitinfer.errors import SplitinferError
from splitinfer.llm import LLM, Settings
from splitinfer.models.building import FIRST_LAYERS
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.weight_files import INDEX
from splitinfer.probes.tokens import parting, tolerance

Prompts = Mapping[str, Sequence[int]]
Verdicts = list[dict[str, Any]]

_PARAMS = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=2)


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
    return [
        {"part": name, "prompt_tokens": len(prompt), **_one_compared(first, second, moved, how)}
        for (name, prompt), first, second in zip(prompts.items(), once, again, strict=True)
    ]


def _one_compared(once: RequestOutput, again: RequestOutput, moved: float, how: str) -> dict[str, Any]:
    margins = [each.top[0][1] - each.top[1][1] for each in once.logprobs or []]
    return reread(once.token_ids, again.token_ids, margins, moved, how)


def _moved(once: RequestOutput, again: RequestOutput) -> float:
    """How far the log probabilities of the likeliest tokens have moved, up to where the answers part: behind that they
    follow other texts."""
    at = parting(once.token_ids, again.token_ids)
    same = slice(None if at is None else at + 1)
    pairs = zip((once.logprobs or [])[same], (again.logprobs or [])[same], strict=False)
    return max(
        (abs(a[1] - b[1]) for one, other in pairs for a in one.top for b in other.top if a[0] == b[0]), default=0.0
    )


# -- the first layers --------------------------------------------------------------------------------------------------


def first_layers(
    checkpoint: Checkpoint, count: int, dtype: str | None, settings: Settings, prompts: Prompts, folder: Path
) -> Verdicts:
    """What plain mlx-lm says about the answers of the first ``count`` layers. ``folder``: empty, for their model.

    Raises:
        SplitinferError: this machine cannot run them, or mlx-lm cannot.
    """
    say(f"the first {count} layers beside mlx-lm's")
    shorten(checkpoint, count, folder)
    stage = {"name": "first layers", "layers": count}
    layout = {"model": str(folder), "stages": [stage], **({} if dtype is None else {"dtype": dtype})}
    with LLM(layout, settings=settings) as llm:
        answers = _answers(llm, prompts)
    plain = PlainMlxLm(str(folder), dtype, has_more_tensors=True)
    try:
        pairs = [(prompt, each.token_ids) for prompt, each in zip(prompts.values(), answers, strict=True)]
        allowed = tolerance(plain.rounding([*pairs[0][0], *pairs[0][1]]))
        return [
            {"part": f"first {count} layers", "prompt_tokens": len(pair[0]), **verdict(plain.judge(*pair), allowed)}
            for pair in pairs
        ]
    finally:
        plain.close()


def shorten(checkpoint: Checkpoint, count: int, folder: Path) -> None:
    """Make ``folder`` a model of the first ``count`` layers, with the same files of weights: those of the other layers
    are not read. Lists with an entry for each layer are as much shorter."""
    for path in [*checkpoint.paths_of(checkpoint.tensors), checkpoint.folder / INDEX]:
        (folder / path.name).symlink_to(path.absolute())
    config = {**shortened(checkpoint.config, count), FIRST_LAYERS: True}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def shortened(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The configuration of the first ``count`` layers.

    >>> shortened({"model_type": "x", "num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "eos_token_id": [1]}, 2)
    {'model_type': 'x', 'num_hidden_layers': 2, 'layer_types': ['a', 'b'], 'eos_token_id': [1]}
    """
    text, layers = config.get("text_config"), config.get("num_hidden_layers")
    shorter = {
        key: value[:count] if isinstance(value, list) and layers and len(value) == layers else value
        for key, value in config.items()
    }
    return {
        **shorter,
        **({"num_hidden_layers": count} if layers else {}),
        **({"text_config": shortened(text, count)} if isinstance(text, Mapping) else {}),
    }
