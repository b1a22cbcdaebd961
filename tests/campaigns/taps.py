"""What taps cost: a prompt's time with them, without them, and with the drafter that they are for; bytes on the link.

    PYTHONPATH=tests .venv/bin/python -m campaigns.taps

A Llama of random weights on two stages in this process, in turns. "taps" is with all that an EAGLE-3 drafter reads of
the stages, and no drafter; "drafter" with its own layer, too, which every token of a prompt passes.
"""

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import tiny
from stages import pipeline, prompt
from trained import save_eagle3

from splitinfer import LLM, SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.engine.stage.head_drafts import HeadDrafter, HeadDrafts

LAYERS, WIDTH, TOKENS, ROUNDS = 32, 256, 1500, 7
SHAPE = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
KINDS = ("none", "taps", "drafter")


def seconds(llm: LLM, kind: str, seed: int) -> float:
    """Of a prompt, until its first token."""
    nothing = mock.patch.object(HeadDrafter, "of", return_value=HeadDrafts())
    silent = mock.patch.object(HeadDrafter, "written", return_value=[])
    with ExitStack() as stack:
        for one in (nothing, silent) if kind == "taps" else ():
            stack.enter_context(one)
        began = time.monotonic()
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        llm.submit(prompt(TOKENS, seed=seed), params, flight=Flight()).result()
        return time.monotonic() - began


def main() -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = tiny.save(Path(name) / "llama", "llama", **SHAPE, max_position_embeddings=4096)
        drafter = save_eagle3(Path(name) / "drafter", width=WIDTH, leaving=(2, LAYERS // 2, LAYERS - 3))
        how = {"token_budget": 256, "prefix_cache": False}
        plain = stack.enter_context(pipeline(folder, [LAYERS // 2] * 2, **how))
        drafted = stack.enter_context(pipeline(folder, [LAYERS // 2] * 2, draft=str(drafter), **how))
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(ROUNDS + 1):
            for kind in KINDS:
                took = seconds(plain if kind == "none" else drafted, kind, number)
                if number:
                    found[kind].append(took)
        for kind, times in found.items():
            ratios = [a / b for a, b in zip(times, found["none"], strict=True)]
            print(f"{kind:8} {statistics.median(times):.3f} s, {statistics.median(ratios):.3f} of none's")
        for name, llm in (("none", plain), ("drafter", drafted)):
            stats = llm.stats()
            need = [ready.weight_bytes for ready in llm._engine.pipeline.ready]
            kv = [ready.kv_bytes_per_token for ready in llm._engine.pipeline.ready]
            print(f"{name:8} {stats['bytes_per_token']:.0f} B a token on the link; weights {need}, KV {kv} B a token")


if __name__ == "__main__":
    main()
