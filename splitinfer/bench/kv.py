"""``splitinfer bench --mode kv``: what quantised KV costs and saves.

fidelity   the whole model on a text, its KV exact and in each format: KL, top-1, perplexity (``bench.shared.fidelity``)
memory     bytes of KV for each token
speed      decoding after a prompt, on the layout's stages, in turns
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.table import Table

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.fidelity import HEADINGS, Fidelity, cells, logprobs, whole_model
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.measure import ratios, summarize
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import range_of, say
from splitinfer.bench.shared.systems import Stages, open_stages, plain_layout
from splitinfer.bench.shared.texts import own_or_read
from splitinfer.bench.shared.workload import Task, made_up
from splitinfer.core.kv.format import EXACT, FORMATS, format_of
from splitinfer.llm import LLM
from splitinfer.models.checkpoint import Checkpoint

_TEXTS, _LENGTH = 12, 400  # passages, and tokens of each
_OPENING = 64  # tokens, at most, of the prompt for a text that the model generates


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    on, checkpoint = machine.describe(), options.checkpoint
    answer = options.prompt_tokens + options.decode_tokens
    check_context(checkpoint, max(answer, _LENGTH + _OPENING), "--prompt-tokens or --decode-tokens")
    with ExitStack() as stack:
        llms = {}
        for name in (EXACT, *FORMATS):
            settings = options.settings(max(answer, _LENGTH) + _OPENING, kv_format=name)
            llms[name] = open_stages(stack, options, settings, f", KV {name}")
            machine.pin_stages(llms[name].layout.stages)  # the workers that were started last
        texts = own_or_read(llms[EXACT], options.text, _TEXTS, _LENGTH, options.seed)
        sizes = {name: _bytes_per_token(llm) for name, llm in llms.items()}
        speeds = _speeds(options, llms, checkpoint)
    fidelity = _fidelity(checkpoint, llms[EXACT].layout.dtype, texts)
    return {
        "measured_on": on,
        "layout": plain_layout(llms[EXACT]),
        "text": "the model's own answers" if options.text is None else options.text.name,
        "prompt_tokens": options.prompt_tokens,
        "formats": {
            name: {
                "bytes_per_token": sizes[name],
                "bytes_to_exact": sizes[name] / sizes[EXACT],
                "tokens_per_second": summarize(speeds[name]),
                "speed_to_exact": ratios(speeds[name], speeds[EXACT]),
                **({} if name == EXACT else fidelity[name]),
            }
            for name in llms
        },
    }


def _bytes_per_token(llm: LLM) -> int:
    return sum(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])


def _speeds(options: Options, llms: Mapping[str, LLM], checkpoint: Checkpoint) -> dict[str, list[float]]:
    """Tokens a second after the prompt, by format; formats take turns."""
    found: dict[str, list[float]] = {name: [] for name in llms}
    for trial in range(options.trials):
        say(f"decoding, {trial + 1} of {options.trials}")
        prompt = made_up(f"{options.seed} kv speed {trial}", options.prompt_tokens, checkpoint.vocab_size or 2)
        for name, llm in llms.items():
            run = Stages(name, llm).run(Task("decode", trial, prompt, options.decode_tokens))
            found[name].append(1 / run.seconds_per_token)
    return found


def _fidelity(checkpoint: Checkpoint, dtype: str, texts: Sequence[list[int]]) -> dict[str, dict[str, Any]]:
    say("reading the text in each format")
    stage = whole_model(checkpoint, dtype)
    vocab_size = checkpoint.vocab_size or 2
    found = {name: Fidelity() for name in FORMATS}
    for text in texts:
        stage.use_format(None)
        exact = logprobs([stage], text, vocab_size)
        for name, fidelity in found.items():
            stage.use_format(format_of(name))
            fidelity.add(exact, logprobs([stage], text, vocab_size), text)
    return {name: fidelity.as_dict() for name, fidelity in found.items()}


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One table of all formats."""
    table = Table(
        "KV", "bytes a token", "to exact", "tokens/s", "to exact", *HEADINGS,
        title=f"KV formats, {found['layout']['name']}; speed behind {found['prompt_tokens']:,} tokens; "
        f"on {found['text']}", title_justify="left",
    )  # fmt: skip
    for name, each in found["formats"].items():
        table.add_row(
            name, f"{each['bytes_per_token']:,}", f"{each['bytes_to_exact']:.3f}",
            f"{each['tokens_per_second']['median']:.1f}", range_of(each["speed_to_exact"]),
            *([] if name == EXACT else cells(each)),
        )  # fmt: skip
    return [table]
