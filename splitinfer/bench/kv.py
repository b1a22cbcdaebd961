"""``splitinfer bench --mode kv``: what quantised KV costs and saves.

fidelity   the whole model on a text, its KV exact and in each format: KL, top-1, perplexity (``bench.shared.fidelity``)
memory     bytes of KV for each token
speed      decoding after a prompt, on the layout's stages, in turns
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.fidelity import Fidelity, logprobs, whole_model
from splitinfer.bench.shared.inputs import check_context, check_text
from splitinfer.bench.shared.measure import ratios, summarize
from splitinfer.bench.shared.printing import print_found
from splitinfer.bench.shared.systems import Stages
from splitinfer.bench.shared.texts import own_or_read
from splitinfer.bench.shared.workload import Task, made_up
from splitinfer.config import find_layout
from splitinfer.console import errors
from splitinfer.core.kv.format import EXACT, FORMATS, format_of
from splitinfer.llm import LLM, Settings
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import open_model

_TEXTS, _LENGTH = 12, 400  # passages, and tokens of each
_OPENING = 64  # tokens, at most, of the prompt for a text that the model generates


@dataclass(frozen=True, slots=True)
class KVOptions:
    """The command line's options. ``text``: to read; ``None``: text that the model generates."""

    layout: str
    model: str | None
    as_json: bool
    trials: int
    prompt_tokens: int
    decode_tokens: int
    seed: int
    connect_timeout: float
    text: Path | None


def measure_kv(options: KVOptions) -> int:
    """Measure, print tables and, as the last line, the document; return the exit code.

    Raises:
        SplitinferError: something cannot be measured.
    """
    check_text(options.text)
    found = _measure(options)
    print_found(found, [_table(found)], as_json=options.as_json, least_width=140)
    return 0


def _measure(options: KVOptions) -> dict[str, Any]:
    on, processors = machine.describe(), machine.free_processors()
    checkpoint = open_model(options.model or find_layout(options.layout).model or "demo")
    check_context(
        checkpoint,
        max(options.prompt_tokens + options.decode_tokens, _LENGTH + _OPENING),
        "--prompt-tokens or --decode-tokens",
    )
    with ExitStack() as stack:
        llms = {}
        for name in (EXACT, *FORMATS):
            llms[name] = stack.enter_context(_open(options, name))
            machine.pin_stages(llms[name].layout.stages, None, processors)  # the workers that were started last
        texts = own_or_read(llms[EXACT], options.text, _TEXTS, _LENGTH, options.seed)
        sizes = {name: _bytes_per_token(llm) for name, llm in llms.items()}
        stages = llms[EXACT].layout.stages
        speeds = _speeds(options, llms, checkpoint)
    fidelity = _fidelity(checkpoint, llms[EXACT].layout.dtype, texts)
    return {
        "measured_on": on,
        "layout": {"name": llms[EXACT].layout.name, "layers": [stage.num_layers for stage in stages]},
        "text": "the model's own answers" if options.text is None else options.text.name,
        "prompt_tokens": options.prompt_tokens,
        "formats": {
            name: {
                "bytes_per_token": sizes[name],
                "bytes_to_exact": sizes[name] / sizes[EXACT],
                "tokens_per_second": asdict(summarize(speeds[name])),
                "speed_to_exact": asdict(ratios(speeds[name], speeds[EXACT])),
                **({} if name == EXACT else fidelity[name]),
            }
            for name in llms
        },
    }


def _open(options: KVOptions, kv_format: str) -> LLM:
    errors.print(f"loading the stages, KV {kv_format}", soft_wrap=True)
    settings = Settings(
        context=max(options.prompt_tokens + options.decode_tokens, _LENGTH) + _OPENING,
        kv_format=kv_format,
        draft="none",
        prefix_cache=False,
        connect_timeout=options.connect_timeout,
        rejoin_timeout=0.0,
    )
    return LLM(options.layout, model=options.model, settings=settings)


def _bytes_per_token(llm: LLM) -> int:
    return sum(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])


def _speeds(options: KVOptions, llms: Mapping[str, LLM], checkpoint: Checkpoint) -> dict[str, list[float]]:
    """Tokens a second after the prompt, by format; formats take turns."""
    found: dict[str, list[float]] = {name: [] for name in llms}
    for trial in range(options.trials):
        errors.print(f"decoding, {trial + 1} of {options.trials}", soft_wrap=True)
        prompt = made_up(f"{options.seed} kv speed {trial}", options.prompt_tokens, checkpoint.vocab_size or 2)
        for name, llm in llms.items():
            run = Stages(name, llm).run(Task("decode", trial, prompt, options.decode_tokens))
            found[name].append(1 / run.seconds_per_token)
    return found


def _fidelity(checkpoint: Checkpoint, dtype: str, texts: Sequence[list[int]]) -> dict[str, dict[str, Any]]:
    errors.print("reading the text in each format", soft_wrap=True)
    stage = whole_model(checkpoint, dtype)
    vocab_size = checkpoint.vocab_size or 2
    found = {name: Fidelity() for name in FORMATS}
    for text in texts:
        stage.use_format(None)
        exact = logprobs(stage, text, vocab_size)
        for name, fidelity in found.items():
            stage.use_format(format_of(name))
            fidelity.add(exact, logprobs(stage, text, vocab_size), text)
    return {name: fidelity.as_dict() for name, fidelity in found.items()}


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(
        "KV", "bytes a token", "to exact", "tokens/s", "to exact", "mean KL", "p99 KL", "top-1 agreement", "perplexity",
        "change (95 %)",
        title=f"KV formats, {found['layout']['name']}; speed behind {found['prompt_tokens']:,} tokens; "
        f"on {found['text']}", title_justify="left",
    )  # fmt: skip
    for name, each in found["formats"].items():
        speed = each["speed_to_exact"]
        row = [
            name, f"{each['bytes_per_token']:,}", f"{each['bytes_to_exact']:.3f}",
            f"{each['tokens_per_second']['median']:.1f}",
            f"{speed['median']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})",
        ]  # fmt: skip
        if name != EXACT:
            low, high = each["perplexity_change_interval"]
            row += [
                f"{each['mean_kl']:.2e}", f"{each['p99_kl']:.2e}", f"{100 * each['top1_agreement']:.2f} %",
                f"{each['perplexity']:.2f}", f"{each['perplexity_change_percent']:+.3f} % ({low:+.3f} to {high:+.3f})",
            ]  # fmt: skip
        table.add_row(*row)
    return table
