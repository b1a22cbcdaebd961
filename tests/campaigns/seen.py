"""Models that see, against mlx-vlm: ``python -m tests.campaigns.seen [FAMILY ...]``.

Each family on two and on three stages: a picture, two of them, one twice, and one behind a long text, greedy and
sampled; eight requests with and without pictures at once, while a link to a worker breaks; and after a restart, which
finds their KV on disk. Every answer has to have the tokens of mlx-vlm's own. The usual run of the tests holds the same
for two pictures in every family, and the rest for two families on two stages.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "pictures")]

import seeing
import stages

from splitinfer import LLM, SamplingParams
from splitinfer.kvstore.store import Disk
from splitinfer.pictures.families import Prepared

NUM = 16
CUTS = ([2, 2], [2, 1, 1])
Case = tuple[list[int], list[Prepared]]
_GREEDY = SamplingParams(max_tokens=NUM, ignore_eos=True)
_SAMPLED = SamplingParams(max_tokens=NUM, ignore_eos=True, temperature=0.8, seed=5)


def _cases(folder: Path) -> dict[str, Case]:
    one, other = seeing.picture(folder), seeing.picture(folder, 2, 5, seed=2)
    return {
        "one picture": (seeing.prompt(5, 9), [one]),
        "two pictures": (seeing.prompt(5, 9, 7), [one, other]),
        "one twice": (seeing.prompt(4, 3, 8), [one, one]),
        "behind a long text": (seeing.prompt(600, 9), [other]),
    }


def _at_once(llm: LLM, cases: Sequence[Case], *, loses: bool = False) -> list[list[int]]:
    requests = [llm.submit(tokens, _GREEDY, pictures=seen) for tokens, seen in cases]
    events = iter(requests[0])
    next(events)
    if loses:
        stages.lose(llm)
    list(events)
    return [requests[0].output.token_ids, *(request.result().token_ids for request in requests[1:])]


def _tried(name: str, cuts: list[int], folder: Path) -> list[str]:
    """What is wrong of one family on some stages."""
    wrong = list[str]()
    cases = _cases(folder)
    mixed = [*cases.values(), *((seeing.prompt(7 + 5 * i), list[Prepared]()) for i in range(4))]
    expected = [seeing.answer(folder, tokens, seen, NUM, seeing.greedy) for tokens, seen in mixed]
    with stages.pipeline(folder, cuts, token_budget=64) as llm:
        for (what, (tokens, seen)), by_greed in zip(cases.items(), expected, strict=False):
            sampled = seeing.answer(folder, tokens, seen, NUM, seeing.sampled)
            wanted = {"greedy": (_GREEDY, by_greed), "sampled": (_SAMPLED, sampled)}
            for how, (params, right) in wanted.items():
                if llm.submit(tokens, params, pictures=seen).result().token_ids != right:
                    wrong.append(f"{what}, {how}")
    with stages.pipeline(folder, cuts, token_budget=64, prefix_cache=False) as llm:
        wrong += ["eight at once"] * (_at_once(llm, mixed) != expected)
        wrong += ["eight at once, a link lost"] * (_at_once(llm, mixed, loses=True) != expected)
    with tempfile.TemporaryDirectory() as kept:
        for run in ("first run", "after a restart"):
            disks = [Disk(Path(kept) / str(i), 10**8) for i in range(len(cuts))]
            with stages.pipeline(folder, cuts, disks=disks) as llm:
                found = [llm.submit(tokens, _GREEDY, pictures=seen) for tokens, seen in mixed]
                wrong += [run] * ([one.result().token_ids for one in found] != expected)
                cached = [one.output.num_cached_tokens or 0 for one in found]
        wrong += ["no KV was found"] * (max(cached) < 512)
    print(f"{name} on {len(cuts)} stages: {len(wrong)} wrong {wrong or ''}; {max(cached)} tokens found", flush=True)
    return wrong


def main() -> int:
    """Try them; the number of what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", default=list(seeing.FAMILIES), metavar="FAMILY")
    wrong = list[str]()
    for name in parser.parse_args().families:
        with tempfile.TemporaryDirectory() as folder:
            seeing.save(Path(folder), name)
            for cuts in CUTS:
                wrong += _tried(name, cuts, Path(folder))
    return min(len(wrong), 100)


if __name__ == "__main__":
    sys.exit(main())
