"""``splitinfer bench --mode exact``: at which token two roads part on this machine, and what the margin was there.

The whole model is in this process and decodes greedily. The reference is one sequence, one row at a time. Every other
road (``roads``) is given the reference's tokens, so that one run shows where it parts first and how often it would
(``partings``). BLAS and device are those that any other command would have here: unlike the other modes this one does
not start anew with OpenBLAS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from splitinfer.bench.exact.partings import margins_summary, summary
from splitinfer.bench.exact.roads import (
    CHUNK,
    Model,
    Road,
    beside_a_prompt,
    chunked,
    replayed,
    take,
    together,
    verified,
)
from splitinfer.bench.shared import machine
from splitinfer.bench.shared.blas import computed_by
from splitinfer.bench.shared.fidelity import whole_model
from splitinfer.bench.shared.inputs import check_context, check_text
from splitinfer.bench.shared.printing import print_found
from splitinfer.bench.shared.texts import passages
from splitinfer.bench.shared.workload import made_up
from splitinfer.config import find_layout
from splitinfer.console import errors
from splitinfer.core.kv.format import format_of
from splitinfer.errors import ConfigError
from splitinfer.llm.prompts import tokenizer_of
from splitinfer.models.batch_invariance import is_batch_invariant
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import open_model
from splitinfer.models.memory import on_gpu
from splitinfer.models.openblas import use_transposed_products

_TOGETHER = (2, 8, 16)  # rows
_CHUNKS = (16, 128)  # of a prompt; and all of it at once
_BLOCKS = (2, 4, 8)  # rows of a block of drafts
_REPLAYS = (64, CHUNK)
_CHARACTERS = 8  # of a token, on average, at most


@dataclass(frozen=True, slots=True)
class ExactOptions:
    """The command line's options. ``prompts``: how many; of ``text``, or made up if it is ``None``."""

    layout: str
    model: str | None
    as_json: bool
    prompts: int
    prompt_tokens: int
    decode_tokens: int
    seed: int
    text: Path | None


def measure_exact(options: ExactOptions) -> int:
    """Measure, print a table and, as the last line, the document; return the exit code.

    Raises:
        SplitinferError: something cannot be measured.
    """
    check_text(options.text)
    found = _measure(options)
    print_found(found, [_table(found)], as_json=options.as_json, least_width=140)
    return 0


def _measure(options: ExactOptions) -> dict[str, Any]:
    on, layout = machine.describe(), find_layout(options.layout)
    checkpoint = open_model(options.model or layout.model or "demo")
    check_context(checkpoint, options.prompt_tokens + options.decode_tokens, "--prompt-tokens or --decode-tokens")
    prompts = _prompts(options, checkpoint)
    errors.print("loading the model", soft_wrap=True)
    stage = whole_model(checkpoint, layout.dtype)
    use_transposed_products(stage.whole)
    stage.use_format(format_of(layout.kv_format))
    if layout.float32_head:
        stage.use_float32_head()
    model = Model(stage, checkpoint.vocab_size or 2)
    answers = []
    for number, prompt in enumerate(prompts, 1):
        errors.print(f"answer {number} of {len(prompts)}, one row at a time", soft_wrap=True)
        answers.append(model.answer(prompt, options.decode_tokens))
    references = [answer.reference for answer in answers]
    roads = []
    for road in _roads(model, options.prompt_tokens):
        errors.print(road.name, soft_wrap=True)
        roads.append({"road": road.name, **summary(references, [take(road, answer) for answer in answers])})
    return {
        "measured_on": on,
        "blas": None if on_gpu() else computed_by(),
        "batch_invariant": is_batch_invariant(),
        "way": model.step.way.value,
        "layout": layout.name,
        "dtype": layout.dtype,
        "kv_format": layout.kv_format,
        "float32_head": layout.float32_head,
        "text": "made up" if options.text is None else options.text.name,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "decode_tokens": options.decode_tokens,
        "margins": margins_summary(references),
        "roads": roads,
    }


def _prompts(options: ExactOptions, checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    if options.text is None:
        size = checkpoint.vocab_size or 2
        return [made_up(f"{options.seed} exact {i}", options.prompt_tokens, size) for i in range(options.prompts)]
    tokenizer = tokenizer_of(checkpoint)
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer, so it cannot read a text; leave --text out")
    read = passages(options.text, options.prompts, _CHARACTERS * options.prompt_tokens)
    return [tuple(tokenizer.encode(text)[: options.prompt_tokens]) for text in read]


def _roads(model: Model, prompt_tokens: int) -> list[Road]:
    sizes = [size for size in _CHUNKS if size < min(prompt_tokens, CHUNK)]
    if prompt_tokens > CHUNK:
        sizes.append(prompt_tokens)
    return [
        *(together(model, rows) for rows in _TOGETHER),
        beside_a_prompt(model),
        *(chunked(model, size) for size in sizes),
        *(verified(model, size) for size in _BLOCKS),
        *(replayed(model, size) for size in _REPLAYS),
    ]


def _table(found: Mapping[str, Any]) -> Table:
    margins, most = found["margins"], max(found["prompt_tokens"])
    table = Table(
        "road", "parted", "at token", "margin there", "largest", "positions that differ", "a logit, at most",
        title=f"one row at a time against other roads, {found['layout']}, {found['measured_on']['device']}; "
        f"{found['decode_tokens']} tokens after {most:,}; margins {margins['median']:.3g} (median), "
        f"{100 * margins['ties']:.2g} % ties", title_justify="left",
    )  # fmt: skip
    for each in found["roads"]:
        row = ["never", "", "", ""]
        if each["parted"]:
            row = [
                f"{each['parted']} of {each['prompts']}", f"{each['first_token']:g}", f"{each['margin']:.3g}",
                f"{each['largest_margin']:.3g}",
            ]  # fmt: skip
        differ = f"{each['positions_that_differ']} of {each['positions']}"
        table.add_row(each["road"], *row, differ, f"{each['largest_logit_difference']:.2g}")
    return table
