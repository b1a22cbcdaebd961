"""One prompt from the command line: stream the answer, or print it as one JSON document."""

import json
import sys
from typing import Any

from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.requests import RequestOutput
from splitinfer.errors import WorkerLost
from splitinfer.llm import LLM


def answer(llm: LLM, text: str, params: SamplingParams, *, raw: bool, as_json: bool) -> int:
    """Answer ``text`` on standard output; the exit code.

    Raises:
        WorkerLost: the pipeline could not go on; what came before is on standard output.
    """
    prompt = llm.encode(text) if raw else llm.encode_chat([{"role": "user", "content": text}])
    output = RequestOutput(len(prompt))
    request = llm.submit(prompt, params)
    for event in request:
        output.add(event)
        if not as_json:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    output.num_cached_tokens = request.result().num_cached_tokens
    if as_json:
        sys.stdout.write(json.dumps(_document(llm, text, output), ensure_ascii=False))
    sys.stdout.write("\n")
    if output.error is not None:
        raise WorkerLost(output.error)
    return 0


def _document(llm: LLM, prompt: str, output: RequestOutput) -> dict[str, Any]:
    stats = llm.stats()
    decode = output.token_times[-1] - output.token_times[0] if len(output.token_times) > 1 else 0.0
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_seconds": output.token_times[0] if output.token_times else None,
        "tokens_per_second": (len(output.token_times) - 1) / decode if decode else None,
        "token_times": output.token_times,
        "logprobs": None
        if output.logprobs is None
        else [{"token_id": p.token_id, "logprob": p.logprob, "top": list(p.top)} for p in output.logprobs],
        "error": output.error,
        "stats": stats,
    }
