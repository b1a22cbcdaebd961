"""What a hop takes at the coordinator's end, by the kind of link: ``python -m tests.campaigns.hops two-small``.

The demo model in two stages of an emulated accelerator, over plain TCP, over TCP with keys, and over rdma by MLX's
ring. Two times, in microseconds: from the device's end of a step until its frame is written (``send`` has returned),
and from the arrival of a result's frame, when the link's thread has it, to the launch of the step that follows.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from processes import RunningWorker, worker

from splitinfer import SamplingParams
from splitinfer.engine.coordinator.loop import Loop
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.engine.coordinator.worker_handle import Event
from splitinfer.engine.device.emulated import EmulatedDevice
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM
from splitinfer.machine.selection import VARIABLE

_WARM = 20  # steps
_LINKS = {
    "tcp": {"address": "local"},
    "encrypted": {},
    "rdma": {"address": "local", "transport": "rdma", "backend": "ring"},
}


@contextmanager
def _with_key() -> Iterator[dict[str, str]]:
    """A worker that asks for keys; its stage in a layout."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = Keyring(Path(folder) / "splitinfer")
        theirs.admit(Keyring().own().public, "here")
        with worker("--host", "0.0.0.0", name="back", env={"XDG_CONFIG_HOME": folder}) as running:
            yield {"address": _on_loopback(running), "key": theirs.own().public}


def _on_loopback(running: RunningWorker) -> str:
    return running.address.replace("0.0.0.0", "127.0.0.1")


@contextmanager
def _watched(out: list[float], back: list[float]) -> Iterator[None]:
    """Note the microseconds of both ways, step by step."""
    wait, send, handle, launch = EmulatedDevice.wait, Pipeline.send, Loop._handle, EmulatedDevice.launch
    ended, arrived = [0.0], [0.0]

    def waited(*args: Any) -> Any:
        span = wait(*args)
        ended[0] = span.ended
        return span

    def sent(*args: Any) -> Any:
        done = send(*args)
        out.append(1e6 * (time.monotonic() - ended[0]))
        return done

    def handled(loop: Loop, event: Any, *more: Any) -> None:
        if isinstance(event, Event):
            arrived[0] = event.at
        handle(loop, event, *more)

    def launched(*args: Any) -> Any:
        if arrived[0]:
            back.append(1e6 * (time.monotonic() - arrived[0]))
        arrived[0] = 0.0
        return launch(*args)

    with (
        patch.object(EmulatedDevice, "wait", waited), patch.object(Pipeline, "send", sent),
        patch.object(Loop, "_handle", handled), patch.object(EmulatedDevice, "launch", launched),
    ):  # fmt: skip
        yield


def _said(times: list[float]) -> str:
    cuts = statistics.quantiles(times[_WARM:], n=100)
    return f"{cuts[49]:.0f} and {cuts[98]:.0f} us"


def main() -> None:
    """Print a line for each machine, kind of link and number of streams: p50 and p99."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", nargs="+", help="files, or names of examples")
    parser.add_argument("--links", default=",".join(_LINKS))
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    for machine in args.machines:
        os.environ[VARIABLE] = machine
        for kind in args.links.split(","):
            near: Callable[[], Any] = _with_key if kind == "encrypted" else nullcontext
            with near() as key:
                stages = [{"name": "a", "layers": 6}, {"name": "b", "layers": 6, **_LINKS[kind], **(key or {})}]
                with LLM({"model": "demo", "stages": stages}) as llm:
                    for streams in map(int, args.streams.split(",")):
                        out, back = list[float](), list[float]()
                        prompts = [list(range(5 + each, 21 + each)) for each in range(streams)]
                        with _watched(out, back):
                            llm.generate(prompts, SamplingParams(max_tokens=args.tokens, ignore_eos=True))
                        print(
                            f"{machine}, {kind}, {streams} streams: from a step's end until its frame is written "
                            f"{_said(out)}; from a frame's arrival to the launch {_said(back)}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
