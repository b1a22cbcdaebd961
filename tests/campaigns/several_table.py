"""Drafts for several streams by simulation alone: ``python -m tests.campaigns.several_table two-large``."""

import argparse
from pathlib import Path

from splitinfer.machine.files import read_machine
from splitinfer.sim.drafts import Crowd, optimum, run, without_drafts
from splitinfer.sim.outcome import quantile

_LONGEST_GAP = 1.7  # of that without drafts, which the bounded optimum may have


def main() -> None:
    """Print one line for each machine, acceptance and number of streams. Ratios are to no drafts in as many groups as
    stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", nargs="+", help="files, or names of examples")
    parser.add_argument("--acceptance", default="0.6,0.8,0.9")
    parser.add_argument("--streams", default="2,4,8,16")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    args = parser.parse_args()
    for name in args.machines:
        machine = read_machine(Path(name))
        for acceptance in map(float, args.acceptance.split(",")):
            for streams in map(int, args.streams.split(",")):
                crowd = Crowd(machine, (acceptance,) * streams, tokens=args.tokens)
                none, live = without_drafts(crowd), run(crowd)
                today, best_none = none[max(none)], max(one.rate for one in none.values())
                choice, best = optimum(crowd)
                _, bounded = optimum(crowd, _LONGEST_GAP * today.longest_gap)
                p99 = quantile(live.gaps, 0.99) / quantile(today.gaps, 0.99)
                print(
                    f"{name} acceptance {acceptance:g}, {streams:2} streams: {live.rate / today.rate:.2f}, to the best "
                    f"without {live.rate / best_none:.2f}, to the optimum {live.rate / best.rate:.2f} "
                    f"({choice.groups} x {choice.flight.first if choice.flight else 0}), within the gap "
                    f"{live.rate / bounded.rate:.2f}; gap p99 {p99:.2f}, longest "
                    f"{live.longest_gap / today.longest_gap:.2f}, slowest {live.slowest / today.slowest:.2f}; "
                    f"{live.groups} groups, drafts {min(live.drafts)} to {max(live.drafts)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
