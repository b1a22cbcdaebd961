"""Which of the things that only a GPU does goes wrong: a probe that saw a wrong token, a crash or a hang is run again
without each of them (``system.gpu_roads``). Its owner can go on without that one, and sends in which it was."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from splitinfer.probes.child import Result
from splitinfer.probes.finding import SEND, Fault, Finding, Outcome, Reason
from splitinfer.probes.registry import Probe
from splitinfer.system.gpu_roads import ABOUT, Road

ROADS = Probe("gpu roads", "what only a GPU does", "", Fault.DEVICE, 0)
_WRONG = (Reason.WRONG_TOKEN, Reason.LARGE_ERROR, Reason.CRASHED, Reason.HUNG, Reason.FAILED)
_OVER_RDMA = ("ring", "worker, rdma")
_LEAST = 5.0  # seconds for a probe of tokens


def find_bad_road(
    probes: Sequence[Probe], results: Mapping[str, Result], seconds: float, run: Callable[..., Result], folder: str
) -> Finding | None:
    """What the first broken probe gives without each road, within ``seconds``; ``None`` if nothing is broken that they
    could break."""
    wrong = [probe for probe in probes if _is_wrong(results[probe.name]) and _taken(probe, results)]
    if not wrong:
        return None
    probe, roads, ends, tried = wrong[0], _taken(wrong[0], results), time.monotonic() + seconds, list[Road]()
    for number, road in enumerate(roads):
        share = (ends - time.monotonic()) / (len(roads) - number)
        if share < _LEAST:
            break
        tried.append(road)
        again = run(replace(probe, environment={**probe.environment, road: "0"}), share, folder)
        if again.found and again.ending is None and not _is_wrong(again):
            return Finding(
                probe.name,
                Outcome.WARNING,
                f"{ABOUT[road]} goes wrong here: without it this is right",
                f"set {road}=0 for every process of a pipeline, and {SEND}",
                group=ROADS.title,
                numbers={"road": str(road)},
            )
    if len(tried) < len(roads):
        sentence = f"there was no time to try it without {ABOUT[roads[len(tried)]]}"
        remedy = "run it again with more time: --seconds 600"
        return Finding(probe.name, Outcome.NOT_RUN, sentence, remedy, ROADS.title, Fault.TIME, Reason.NO_TIME)
    sentence = "it goes wrong without each of these, too: " + ", ".join(ABOUT[road] for road in tried)
    return Finding(probe.name, Outcome.NOTE, sentence, SEND, group=ROADS.title)


def _is_wrong(result: Result) -> bool:
    return any(each.outcome is Outcome.FAILED and each.reason in _WRONG for each in result.findings)


def _taken(probe: Probe, results: Mapping[str, Result]) -> tuple[Road, ...]:
    """The roads that a probe takes on this machine."""
    device = results["about"].numbers("device") or {}
    is_ahead = device.get("computes_at_launch") is False
    return tuple(road for road in Road if (probe.name in _OVER_RDMA if road is Road.RDMA else is_ahead))
