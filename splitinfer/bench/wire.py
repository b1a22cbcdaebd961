"""``splitinfer bench --mode wire``: what codecs on links cost and save.

rows       bytes, seconds, and errors of unpacked rows: of ordinary values, and with massive ones among them, as models
           have them: in the residual stream of trained models some channels are always large, and a few values
           enormous, 1e2 to 1e3 in many, 7e5 in Gemma 3 (arXiv 2605.15572). Errors are of all values, and of the *usual*
           ones: a codec may preserve the large values and lose all others
fidelity   the whole model on a text, cut at a quarter, the half and three quarters of its layers, all rows packed at
           the cut: KL, top-1, perplexity (``bench.shared.fidelity``)
prompts    TTFT of a long prompt on the layout's stages, in turns: on the link as it is, and on an emulated one so slow
           that the bytes of a prompt take one and a half times as long as a stage computes
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from rich.table import Table

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.fidelity import HEADINGS, Fidelity, cells, logprobs, one_stage, whole_model
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.measure import ratios, summarize
from splitinfer.bench.shared.options import Options, emulated_links
from splitinfer.bench.shared.printing import range_of, say
from splitinfer.bench.shared.systems import Stages, open_stages, plain_layout, vocabulary
from splitinfer.bench.shared.texts import own_or_read
from splitinfer.bench.shared.workload import Task, made_up
from splitinfer.core.plan import TensorSpec
from splitinfer.core.wire_codec import CODECS, FP16, NONE, bytes_per_row
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.codecs import pack, seconds_per_row, unpack
from splitinfer.models.hub import open_model
from splitinfer.models.loader import count_layers

_LENGTH = 400  # tokens of a passage
_OPENING = 64  # tokens, at most, of the prompt for a text that the model generates
_SLOW = 1.5  # times a stage's computing that the bytes of a prompt take on the slow link
_AS_IT_IS, _SLOWED = "as it is", "slow"
_SYSTEMS = ((_AS_IT_IS, NONE), *((_SLOWED, codec) for codec in (NONE, *CODECS)))
_WIDTH = 4096
_ROWS = 256
_LARGE = (7, 1500, 3000)  # channels that are always large
_SPIKE = 42  # the channel of the enormous value
_DTYPE = "bfloat16"


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    layout = options.found_layout
    if layout.num_stages == 1:
        raise ConfigError(f"codecs are for the links between stages; layout {layout.name} has 1 stage, so none")
    on, checkpoint = machine.describe(), options.checkpoint
    check_context(checkpoint, max(options.prompt_tokens + 1, _LENGTH + _OPENING), "--prompt-tokens")
    say("packing rows")
    rows = _measure_rows()
    with ExitStack() as stack:
        plain = _open(options, stack, NONE, None)
        texts = own_or_read(plain, options.text, options.texts, _LENGTH, options.seed)
        slow = _slow_link(options, plain)
        llms = {(_AS_IT_IS, NONE): plain}
        for link, codec in _SYSTEMS[1:]:
            llms[link, codec] = _open(options, stack, codec, slow if link == _SLOWED else None)
        prompts = _prompts(options, llms)
    return {
        "measured_on": on,
        "layout": plain_layout(plain),
        "rows": rows,
        "text": "the model's own answers" if options.text is None else options.text.name,
        "fidelity": _fidelity(checkpoint, plain.layout.dtype, texts) if texts else [],
        "prompt_tokens": options.prompt_tokens,
        "slow_link": asdict(slow),
        "prompts": prompts,
    }


# -- rows ----------------------------------------------------------------------------------------


def _measure_rows() -> dict[str, Any]:
    """The figures of every codec, for the document."""
    kinds = {"ordinary": _rows(), "spike 2e3": _rows(50, 2e3), "spike 3e5": _rows(500, 3e5)}
    halves = bytes_per_row(FP16, _WIDTH, _DTYPE)
    codecs = {}
    for codec in (NONE, *CODECS):
        size = bytes_per_row(codec, _WIDTH, _DTYPE)
        codecs[codec] = {
            "bytes_per_row": size,
            "to_fp16": size / halves,
            "seconds_per_row": 0.0 if codec == NONE else seconds_per_row(codec, TensorSpec(_DTYPE, (_WIDTH,)), _ROWS),
            "off": {kind: _off(codec, rows) for kind, rows in kinds.items()},
        }
    return {"width": _WIDTH, "dtype": _DTYPE, "kinds": list(kinds), "codecs": codecs}


def _rows(large: float = 1.0, spike: float = 0.0) -> mx.array:
    rows = mx.random.normal((_ROWS, _WIDTH), key=mx.random.key(3))
    for channel in _LARGE:
        rows[:, channel] *= large
    rows[:, _SPIKE] += spike
    return rows.astype(mx.bfloat16)


def _off(codec: str, rows: mx.array) -> dict[str, float]:
    """``fit``: the share of rows that can be packed; ``all``, ``usual``: root mean square errors of those, relative."""
    if codec == NONE:
        return {"fit": 1.0, "all": 0.0, "usual": 0.0}
    fits, packed = pack(codec, rows)
    fitting = np.flatnonzero(np.array(fits))
    if not len(fitting):
        return {"fit": 0.0, "all": 0.0, "usual": 0.0}
    back = np.array(unpack(codec, packed, mx.float32))[fitting]
    was = np.array(rows.astype(mx.float32))[fitting]
    usual = np.setdiff1d(np.arange(_WIDTH), (*_LARGE, _SPIKE))
    return {
        "fit": len(fitting) / _ROWS,
        "all": _relative(back, was),
        "usual": _relative(back[:, usual], was[:, usual]),
    }


def _relative(back: np.ndarray, was: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(back - was))) / float(np.mean(np.square(was))))


# -- prompts -------------------------------------------------------------------------------------


def _open(options: Options, stack: ExitStack, codec: str, link: Any) -> LLM:
    context = max(options.prompt_tokens, _LENGTH) + _OPENING
    settings = options.settings(context, codec=codec, token_budget=options.token_budget)
    with ExitStack() as while_opening:
        if link is not None:
            while_opening.enter_context(emulated_links().installed(link))
        what = f", codec {codec}{'' if link is None else ', slow link'}"
        llm = open_stages(stack, options, settings, what)
    machine.pin_stages(llm.layout.stages)  # the workers that were started last
    return llm


def _slow_link(options: Options, llm: LLM) -> Any:
    """A link on which the bytes of a prompt take ``_SLOW`` times as long as the slowest stage computes."""
    _ttft(options, llm, -2)  # warms up
    before = llm.stats()["stages"]
    _ttft(options, llm, -1)
    after = llm.stats()["stages"]
    busy = max(b["busy_seconds"] - a["busy_seconds"] for a, b in zip(before, after, strict=True))
    sent = max(b["bytes_sent"] - a["bytes_sent"] for a, b in zip(before, after, strict=True))
    return emulated_links().LinkProfile(bytes_per_second=sent / (_SLOW * busy))


def _ttft(options: Options, llm: LLM, trial: int) -> float:
    vocab_size = vocabulary(llm, open_model(str(llm.layout.model)))
    prompt = made_up(f"{options.seed} wire {trial}", options.prompt_tokens, vocab_size)
    return Stages("", llm).run(Task("prefill", trial, prompt, 1)).ttft


def _prompts(options: Options, llms: Mapping[tuple[str, str], LLM]) -> list[dict[str, Any]]:
    """TTFT of each system, in turns, and the ratio to no codec on the same link."""
    times: dict[tuple[str, str], list[float]] = {each: [] for each in llms}
    for trial in range(-1, options.trials):
        for each, llm in llms.items():
            seconds = _ttft(options, llm, trial)
            if trial >= 0:
                times[each].append(seconds)
                say(f"trial {trial + 1} of {options.trials}: link {each[0]}, {each[1]}: {seconds:.3g} s")
    return [
        {
            "link": link,
            "codec": codec,
            "chosen": [stage["codec"] for stage in llm.stats()["stages"][:-1]],
            "bytes_per_token": llm.stats()["bytes_per_token"],
            "ttft": summarize(times[link, codec]),
            "to_none": ratios(times[link, codec], times[link, NONE]),
        }
        for (link, codec), llm in llms.items()
    ]


# -- fidelity ------------------------------------------------------------------------------------


def _fidelity(checkpoint: Checkpoint, dtype: str, texts: list[list[int]]) -> list[dict[str, Any]]:
    """Fidelity by cut and codec, each compared with the whole model; ``none`` is among them and must change nothing."""
    layers, found, vocab_size = count_layers(checkpoint), list[dict[str, Any]](), checkpoint.vocab_size or 2
    whole = whole_model(checkpoint, dtype)
    exact = [logprobs([whole], text, vocab_size) for text in texts]
    for cut in sorted({max(1, layers * quarter // 4) for quarter in (1, 2, 3)} - {layers}):
        say(f"reading the text, cut after {cut} of {layers} layers")
        stages = [one_stage(checkpoint, dtype, 0, cut), one_stage(checkpoint, dtype, cut, layers)]
        each = {codec: Fidelity() for codec in (NONE, *CODECS)}
        for text, one in zip(texts, exact, strict=True):
            for codec, fidelity in each.items():
                fidelity.add(one, logprobs(stages, text, vocab_size, partial(_cross, codec)), text)
        found += [{"cut": cut, "layers": layers, "codec": codec, **one.as_dict()} for codec, one in each.items()]
    return found


def _cross(codec: str, hidden: mx.array) -> mx.array:
    """Hidden states as they arrive, all rows of which are packed."""
    if codec == NONE:
        return hidden
    fits, packed = pack(codec, hidden[0])
    return mx.where(fits[:, None], unpack(codec, packed, hidden.dtype), hidden[0])[None]


# -- tables --------------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Tables of rows, of fidelity where a text was read, and of prompts."""
    return [_row_table(found), *([_text_table(found)] if found["fidelity"] else []), _prompt_table(found)]


def _row_table(found: Mapping[str, Any]) -> Table:
    rows = found["rows"]
    table = Table(
        "codec", "bytes a row", "to fp16", "us a row", *(f"off, {kind}" for kind in rows["kinds"]),
        title=f"rows of {rows['width']:,} values; how far off: root mean square relative to the row's, all values, "
        "and those that are not massive", title_justify="left",
    )  # fmt: skip
    for name, each in rows["codecs"].items():
        off = [
            f"{100 * each['off'][kind]['all']:.3g} %, {100 * each['off'][kind]['usual']:.3g} %"
            if each["off"][kind]["fit"] == 1 else f"{100 * (1 - each['off'][kind]['fit']):.0f} % of rows do not fit"
            for kind in rows["kinds"]
        ]  # fmt: skip
        micros = 1e6 * each["seconds_per_row"]
        table.add_row(name, f"{each['bytes_per_row']:,}", f"{each['to_fp16']:.3f}", f"{micros:.3g}", *off)
    return table


def _text_table(found: Mapping[str, Any]) -> Table:
    table = Table(
        "cut after", "codec", *HEADINGS,
        title=f"all rows packed at the cut; on {found['text']}", title_justify="left",
    )  # fmt: skip
    for each in found["fidelity"]:
        table.add_row(f"{each['cut']} of {each['layers']}", each["codec"], *cells(each))
    return table


def _prompt_table(found: Mapping[str, Any]) -> Table:
    megabytes = found["slow_link"]["bytes_per_second"] / 1e6
    table = Table(
        "link", "codec", "is", "bytes a token", "TTFT s", "to none",
        title=f"a prompt of {found['prompt_tokens']:,} tokens, {found['layout']['name']}; the slow link carries "
        f"{megabytes:.3g} MB/s", title_justify="left",
    )  # fmt: skip
    for each in found["prompts"]:
        table.add_row(
            each["link"], each["codec"], ", ".join(each["chosen"]), f"{each['bytes_per_token']:,.0f}",
            f"{each['ttft']['median']:.3g}", range_of(each["to_none"], 3),
        )  # fmt: skip
    return table
