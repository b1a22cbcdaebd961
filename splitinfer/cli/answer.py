"""Answers one prompt from the command line: streams the text, or prints one JSON document."""

import sys
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from splitinfer.chat.formatting import ERASE, LOOK_EVERY, Stats, progress
from splitinfer.chat.formatting import status as phrases
from splitinfer.common.json_text import dumps
from splitinfer.common.plain_text import without_controls
from splitinfer.core.sampling_defaults import RECOMMENDABLE
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.loop.requests import RequestOutput
from splitinfer.errors import WorkerLost
from splitinfer.llm import LLM, Request


def answer(llm: LLM, text: str, params: SamplingParams, *, raw: bool, as_json: bool, status: bool) -> int:
    """Write the answer to ``text`` to standard output and return the exit code. Until the answer begins, a terminal
    shows the reasoning and a line of figures; in JSON, the reasoning stands beside the answer.

    ``raw`` continues the text without the model's chat template. ``status`` adds a line of figures below the answer,
    live on a terminal.

    Raises:
        WorkerLost: the pipeline could not go on; the answer so far is on standard output.
    """
    prompt = llm.tokenizer.encode(text) if raw else llm.tokenizer.encode_chat([{"role": "user", "content": text}])
    before = llm.stats()
    request = llm.submit(prompt, params, raw=raw)
    if as_json:
        output = request.result()
        sys.stdout.write(dumps(_document(llm, text, params, output)) + "\n")
    elif status and sys.stdout.isatty():
        output = _show_live(llm, request, before, text if raw else "")
    else:
        output = _show_plain(request, text if raw and status else "")
        if status:
            sys.stderr.write(_line(output, before, llm.stats()) + "\n")
    if output.error is not None:
        raise WorkerLost(output.error)
    return 0


def _show_plain(request: Request, beginning: str) -> RequestOutput:
    shows, erase = sys.stdout.isatty(), ""
    for event in request.watched(LOOK_EVERY if shows else None):
        if event is not None:
            sys.stdout.write(erase + beginning + (without_controls(event.text) if shows else event.text))
            beginning = erase = ""
        elif (reading := request.reading) is not None:
            erase = ERASE
            sys.stdout.write(erase + progress(reading))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return request.output


def _show_live(llm: LLM, request: Request, before: Stats, beginning: str) -> RequestOutput:
    shown = Text(beginning, style="dim")
    with Live(console=Console(), refresh_per_second=12, vertical_overflow="visible") as live:
        for event in request.watched(LOOK_EVERY):
            if event is None:
                if (reading := request.reading) is not None:
                    live.update(Text.assemble(shown, (progress(reading), "dim")))
                continue
            shown.append(without_controls(event.text), style="not dim")
            line, output = _line(request.output, before, llm.stats()), request.output
            thought = "" if output.text else without_controls(output.reasoning)
            live.update(Text.assemble(shown, (thought, "dim"), "\n\n", (line, "cyan")))
    return request.output


def _line(output: RequestOutput, before: Stats, after: Stats) -> str:
    return " · ".join(phrases(output, before, after))


def _document(llm: LLM, prompt: str, params: SamplingParams, output: RequestOutput) -> dict[str, Any]:
    times = output.token_times
    decode = times[-1] - times[0] if len(times) > 1 else 0.0
    logprobs = [{"token_id": p.token_id, "logprob": p.logprob, "top": list(p.top)} for p in output.logprobs or []]
    return {
        "prompt": prompt,
        "sampling": {name: getattr(params, name) for name in RECOMMENDABLE},
        "text": output.text,
        "reasoning": output.reasoning,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_seconds": times[0] if times else None,
        "tokens_per_second": (len(times) - 1) / decode if decode else None,
        "token_times": times,
        "logprobs": None if output.logprobs is None else logprobs,
        "error": output.error,
        "stats": llm.stats(),
    }
