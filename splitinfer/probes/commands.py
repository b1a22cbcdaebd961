"""Other modes of ``splitinfer bench`` as probes, on a model of two stages on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitinfer.bench.shared.random_model import Shape, make
from splitinfer.core.json_text import dumps
from splitinfer.errors import ModelError
from splitinfer.probes.child import Report
from splitinfer.probes.finding import SEND, Finding, Reason, failed, passed
from splitinfer.probes.machine import DEMO_LAYERS

_MOST_DIFFERING = 0.25  # share of positions at which a road may choose another token, all by rounding


def measure(options: Mapping[str, Any], report: Report) -> None:
    """Report the document of one mode. Without ``shape`` the model is the demo; ``words``: more of the command line.

    Raises:
        ModelError: the mode failed.
    """
    mode, shape, folder = options["mode"], options.get("shape"), Path(options["folder"])
    model = "demo" if shape is None else model_folder(folder, shape)
    layout = folder / f"{mode}-{'demo' if shape is None else 'random'}.yaml"
    layout.write_text(dumps(halves(model, DEMO_LAYERS if shape is None else shape["layers"])), encoding="utf-8")
    command = [sys.executable, "-m", "splitinfer", "bench", "--mode", mode, "--layout", str(layout), "--json"]
    done = subprocess.run(
        [*command, *options["words"]], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ModelError(f"splitinfer bench --mode {mode}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    report(judge_exact(found) if mode == "exact" else passed(mode, "", found))


def model_folder(folder: Path, sizes: Mapping[str, Any]) -> Path:
    """A random model's folder below ``folder``. Probes that name the same sizes share it."""
    found = folder / "-".join(str(value) for value in sizes.values())
    if not found.exists():
        partial = found.with_name(f".{found.name}.{os.getpid()}")  # whoever makes it may be ended meanwhile
        make(partial, Shape(**sizes))
        partial.rename(found)
    return found


def halves(model: str | Path, layers: int) -> dict[str, Any]:
    first = layers - layers // 2
    stages = [{"name": "front", "layers": first}, {"name": "back", "layers": layers - first, "address": "local"}]
    return {"model": str(model), "stages": stages}


def judge_exact(given: Mapping[str, Any]) -> Finding:
    """``bench --mode exact``: on a batch-invariant device no road may part; elsewhere only where it rounds."""
    roads, name = given["roads"], "exact"
    parted = [one for one in roads if one["parted"]]
    if parted and given["batch_invariant"]:
        sentence = f"{len(parted)} of {len(roads)} ways give other tokens, though rows do not depend on each other here"
        return failed(name, Reason.WRONG_TOKEN, sentence, SEND, given)
    worst = max(roads, key=lambda one: one["positions_that_differ"] / max(1, one["positions"]))
    if worst["positions_that_differ"] > _MOST_DIFFERING * worst["positions"]:
        differ = f"{worst['positions_that_differ']} of {worst['positions']} tokens otherwise"
        sentence = f"{worst['road']} would choose {differ}, which is more than rounding"
        return failed(name, Reason.WRONG_TOKEN, sentence, SEND, given)
    if not parted:
        return passed(name, f"all of {len(roads)} ways to compute the same tokens agree", given)
    margin = max(one["largest_margin"] for one in parted)
    sentence = f"{len(parted)} of {len(roads)} ways give other tokens, at margins of up to {margin:.2g}"
    return passed(name, sentence, given, Reason.ROUNDING)
