"""Staged situations on the live pipeline: what the page says, beside the causes in the trace of the same steps.

    python -m tests.page.staged_live
    python -m tests.page.staged_live --only "a slow link" --seconds 8

Two stages of a small model in the times of an emulated accelerator, with emulated links, a trace, and the page's own
feed. Of each situation: what was staged is said; each cause's share of each stage is that of the trace, to a point of a
hundred; and a link or a host is blamed where the trace has it, and nowhere else. `tests/server/page/test_staged.py` has
these and more in virtual time. The exit code is the number of situations that failed.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "server" / "page")]

import stages
import tiny
import trace_causes
import yaml

from splitinfer import SamplingParams
from splitinfer.core.metrics.gaps import Cause
from splitinfer.core.speculation.flight import Flight
from splitinfer.llm import LLM, Settings
from splitinfer.machine.selection import VARIABLE
from splitinfer.server.page.feed import EVERY, Feed
from transports import emulated
from transports.emulated import LinkProfile

_POINT = 0.01
_MUCH = 0.15  # from which on the words blame a link or a host


@dataclass(frozen=True)
class Live:
    """``says``: codes that must be among the words. ``layers``: the cut. ``layer_ms``, ``row_ms``: of each layer.
    ``prompts``: their tokens, one for each request."""

    says: tuple[str, ...]
    prompts: tuple[int, ...] = (8,)
    layers: tuple[int, int] = (2, 2)
    layer_ms: float = 6.0
    row_ms: float = 0.02
    link: LinkProfile | None = None
    drafts: Flight | None = None
    settings: dict[str, Any] = field(default_factory=dict)


SITUATIONS = {
    "nothing is asked": Live(("rests",), ()),
    "one stream": Live(("one_stream",)),
    "one stream over a slow link": Live(("one_stream", "link_latency"), link=LinkProfile(latency=0.02)),
    "as many streams as stages": Live(("full",), (8, 8), layer_ms=12),
    "many streams": Live(("full",), (8,) * 6, layer_ms=12),
    "many streams, the first stage is slow": Live(("uneven",), (8,) * 4, (3, 1)),
    "many streams, the last stage is slow": Live(("uneven",), (8,) * 4, (1, 3)),
    "many streams over a slow link": Live(("link_latency",), (8,) * 2, link=LinkProfile(latency=0.02)),
    "long prompts": Live(("prompt",), (3500,) * 8, layer_ms=2, row_ms=0.5, settings={"max_running": 1}),
    "long prompts over a thin cable": Live(
        ("prompt", "link_bytes"), (3500,) * 8, layer_ms=2, row_ms=0.1,
        link=LinkProfile(bytes_per_second=2e5), settings={"max_running": 1},
    ),
    "drafts that are not right": Live(("void_drafts",), drafts=Flight(6, 6, 3)),
    "more are asked than may run": Live(("full", "queue_full"), (8,) * 6, layer_ms=12, settings={"max_running": 2}),
}  # fmt: skip


@contextlib.contextmanager
def running(live: Live, folder: Path) -> Iterator[LLM]:
    """The pipeline of a situation."""
    model = tiny.save(folder / "model", "llama", num_hidden_layers=4, max_position_embeddings=4096, eos_token_id=0)
    rows = {count: live.layer_ms + live.row_ms * count for count in (1, 8, 64, 512)}
    accelerator = folder / "machine.yaml"
    accelerator.write_text(
        yaml.safe_dump({"each_layer": {"rows_ms": rows, "buffers": 2}, "draft_ms": 0.2, "launches_ahead": True})
    )
    os.environ[VARIABLE] = str(accelerator)
    link = emulated.installed(live.link) if live.link is not None else contextlib.nullcontext()
    settings = Settings(trace=folder / "trace.json", flight=live.drafts, context=4096, **live.settings)
    with link, stages.worker("tcp") as address:
        layout = stages.layout(model, live.layers, [address]) | ({"draft": "ngram"} if live.drafts else {})
        with LLM(layout, settings=settings) as llm:
            yield llm


def ask(llm: LLM, live: Live) -> list[Any]:
    """The requests, which outlast what is looked at."""
    params = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.9 if live.drafts else 0.0, seed=1)
    prompts = [stages.prompt(count, seed=11 + 3 * i) for i, count in enumerate(live.prompts)]
    if live.drafts:
        prompts = [[5, 6, 7, 8] * 2 for _ in prompts]
    sizes = [min(params.max_tokens, 4096 - len(prompt)) if len(prompt) < 1000 else 1 for prompt in prompts]
    return [
        llm.submit(prompt, SamplingParams(max_tokens=size, ignore_eos=True, temperature=params.temperature, seed=1))
        for prompt, size in zip(prompts, sizes, strict=True)
    ]


def watch(llm: LLM, live: Live, seconds: float) -> tuple[Feed, dict[str, Any], list[float]]:
    """What the page has after so many seconds."""
    feed = Feed(llm, "staged", lambda: False)
    with feed.watched():
        feed.since(0)
        asked = [time.monotonic()]
        requests, number, document = ask(llm, live), 0, dict[str, Any]()
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            time.sleep(EVERY)
            for made, each in feed.since(number):
                number, document = made, each
        kept = Feed(llm, "kept", lambda: False)
        kept._samples.extend(feed._samples)
    for request in requests:
        request.abort()
    return kept, document, asked


def complaints(live: Live, document: dict[str, Any], causes: Sequence[trace_causes.Causes]) -> Iterator[str]:
    """What is not as it should be."""
    codes = [each["code"] for each in document["words"]]
    yield from (f"{code} is not said, but {codes}" for code in live.says if code not in codes)
    for i, (stage, own) in enumerate(zip(document["stages"], causes, strict=True)):
        pairs = [("computing", stage["duty"], own.duty)]
        pairs += [(str(cause), stage["gaps"].get(str(cause), 0.0), own.share(str(cause))) for cause in Cause]
        yield from (f"stage {i}, {what}: {a:.3f}, in the trace {b:.3f}" for what, a, b in pairs if abs(a - b) > _POINT)
        for cause in ("link", "host"):
            is_said = any(each["stage"] == i and each["code"].startswith(cause) for each in document["words"])
            share = own.share(cause)
            if abs(share - _MUCH) > _POINT and is_said != (share > _MUCH):
                yield f"stage {i} is{'' if is_said else ' not'} said to wait for its {cause}: {share:.3f} in the trace"


def play(name: str, live: Live, seconds: float) -> bool:
    """Stage a situation; whether all was as it should be."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with running(live, folder) as llm:
            feed, document, asked = watch(llm, live, seconds)
            assert llm._trace is not None
            zero = llm._trace._zero / 1e9
        numbers = {step.number for sample in list(feed._samples)[1:] for step in sample.steps}
        spells = [(at - zero, float("inf")) for at in asked]
        events = trace_causes.read(folder / "trace.json")
        causes = trace_causes.causes(events, 2, spells, [at - zero for at in asked], numbers)
    found = list(complaints(live, document, causes))
    shares = ", ".join(f"{100 * one.duty:.0f} %" for one in causes)
    print(f"{'failed' if found else 'passed'}  {name}: {len(numbers)} steps, {shares}; "
          f"{' '.join(each['code'] for each in document['words'])}")  # fmt: skip
    print("".join(f"  {line}\n" for line in found), end="", flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="that each situation lasts")
    parser.add_argument("--only", nargs="*", help="names of situations")
    options = parser.parse_args()
    chosen = {name: live for name, live in SITUATIONS.items() if not options.only or name in options.only}
    failed = sum(not play(name, live, options.seconds) for name, live in chosen.items())
    print(f"{failed} of {len(chosen)} situations failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
