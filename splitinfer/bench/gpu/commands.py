"""Other modes of ``splitinfer bench``, on a model of two stages on this machine: ``exact`` and ``kv``."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitinfer.bench.gpu.models import halves, model_folder
from splitinfer.core.json_text import dumps
from splitinfer.errors import ModelError
from splitinfer.jobs.process import Report

_DEMO_LAYERS = 12
_USAGE = 2  # the exit code of a command line that is wrong


def measure(options: Mapping[str, Any], report: Report) -> None:
    """Report the document of one mode. Without ``shape`` the model is the demo.

    Raises:
        ModelError: the mode is not there, or failed.
    """
    mode, shape = options["mode"], options.get("shape")
    model = "demo" if shape is None else model_folder(options["folder"], shape)
    layout = Path(options["folder"]) / f"{mode}-{'demo' if shape is None else 'random'}.yaml"
    layout.write_text(dumps(halves(model, _DEMO_LAYERS if shape is None else shape["layers"])), encoding="utf-8")
    words = ["--mode", mode, "--layout", str(layout), "--json", *options["words"]]
    done = subprocess.run(
        [sys.executable, "-m", "splitinfer", "bench", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise ModelError(_why(mode, done))
    report(mode, json.loads(done.stdout.strip().splitlines()[-1]))


def _why(mode: str, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == _USAGE and "is not one of" in " ".join(done.stderr.split()):
        return f"splitinfer bench has no --mode {mode} here"
    lines = done.stderr.strip().splitlines()
    return f"splitinfer bench --mode {mode}: {lines[-1] if lines else f'exit code {done.returncode}'}"
