"""Many sessions over one rdma link to one worker, on emulated JACCL: what is left after them?

    python -m tests.campaigns.rdma_sessions --sessions 200 --kills 5

One process opens a pipeline, generates, and closes it, again and again; spread over the sessions, its child of the link
is killed during a generation. Afterwards

- every answer was the same;
- there was one group, and one more for each kill, and never two processes on a device;
- nobody but the readers of those who were killed was killed in a receive, and they were counted;
- no process, descriptor, thread or shared memory is left.

The exit code is 1 if anything was wrong.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from processes import until, worker

import splitinfer
from splitinfer.llm import LLM
from transports.emulated_jaccl.device import Limits
from transports.emulated_jaccl.world import World
from transports.rdma import leftovers
from transports.rdma.groups import kept_groups

PARAMS = splitinfer.SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=4)
WRITER, READER = "rdma_en0", "rdma_en1"


def campaign(num_sessions: int, num_kills: int, world: World) -> list[str]:
    """Run the sessions; what was wrong."""
    kills = {(number + 1) * num_sessions // (num_kills + 1) for number in range(num_kills)}
    answers, shapes = set(), []
    segments = set(Path("/dev/shm").glob("splitinfer-*"))
    with worker(name="b") as there:
        stage = {"name": "b", "layers": 6, "address": there.address, "transport": "rdma", "device": World.devices()}
        layout = {"model": "demo", "stages": [{"name": "a", "layers": 6}, stage]}
        for session in range(num_sessions):
            with LLM(layout) as llm:
                request = llm.submit("Once upon a time", PARAMS)
                events = iter(request)
                next(events)
                if session in kills:
                    _own_carrier().kill()
                answers.add(tuple(request.result().token_ids))
            if session in (1, num_sessions - 1):
                shapes.append(_shape(there.process))
        kept_groups.end_all()
    until(lambda: world.usage(WRITER).num_alive + world.usage(READER).num_alive == 0, "the children end")
    counted = [each.device for each in leftovers.read()]
    wrong = {
        f"{len(answers)} different answers": len(answers) != 1,
        f"{world.usage(WRITER).num_groups} groups": world.usage(WRITER).num_groups != 1 + num_kills,
        f"{world.usage(READER).num_left} readers left memory": world.usage(READER).num_left > num_kills,
        f"{world.usage(WRITER).num_left} writers left memory": world.usage(WRITER).num_left > 0,
        f"counted were {counted}": counted.count(READER) != world.usage(READER).num_left,
        f"operations at once on {WRITER} or {READER}": world.overlaps(WRITER) + world.overlaps(READER) > 0,
        f"from {shapes[0]} to {shapes[-1]}": any(last > first + 4 for first, last in zip(*shapes, strict=True)),
        "shared memory is left": set(Path("/dev/shm").glob("splitinfer-*")) > segments,
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


def _own_carrier() -> psutil.Process:
    return next(child for child in psutil.Process().children() if "transports.rdma.child" in child.cmdline())


def _shape(there: psutil.Process) -> tuple[int, ...]:
    """Descriptors, children and threads here and at the worker, which must not grow."""
    here = psutil.Process()
    return (
        here.num_fds(), len(here.children()), threading.active_count(),
        there.num_fds(), len(there.children()), there.num_threads(),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="splitinfer-sessions-") as folder:
        regions = 100 + 64 * options.kills  # a killed writer's reader is killed in a receive
        world = World.make(Path(folder) / "world", limits=Limits(regions=regions, queue_pairs=10 + options.kills))
        os.environ |= {**world.environment, "XDG_CACHE_HOME": folder}
        began = time.monotonic()
        wrong = campaign(options.sessions, options.kills, world)
        took = time.monotonic() - began
        print(f"{options.sessions} sessions in {took:.0f} s: {world.usage(WRITER)}, {world.usage(READER)}")
    for each in wrong:
        print(f"wrong: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
