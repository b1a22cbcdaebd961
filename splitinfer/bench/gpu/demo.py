"""A larger demo pair than the one that comes with splitinfer, trained shortly: ``scripts/train_demo_model``."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitinfer.errors import ConfigError, ModelError
from splitinfer.jobs.process import Report

_SCRIPTS = Path(__file__).parents[3] / "scripts"
_TARGET, _DRAFT = 0.55, 0.15  # of the time; the rest is for the tokenizer, compiling and judging


def measure(options: Mapping[str, Any], report: Report) -> None:
    """Train in ``limit_s`` seconds on the text in ``corpus``; ``pair``: where the two models stay.

    Raises:
        ConfigError: there is no text, or this is no clone of the repository.
        ModelError: the training failed.
    """
    if options["corpus"] is None:
        raise ConfigError("there is no text to learn from: --corpus FOLDER")
    if not (_SCRIPTS / "demo_training").is_dir():
        raise ConfigError("the training is in a clone of the repository only (scripts/demo_training)")
    minutes = options["limit_s"] / 60
    out = options["pair"] or str(Path(options["folder"]) / "pair")
    budget = ["--minutes", f"{_TARGET * minutes:.3f}", "--draft-minutes", f"{_DRAFT * minutes:.3f}"]
    words = [options["corpus"], out, *budget, *options["words"]]
    path = os.pathsep.join(filter(None, (str(_SCRIPTS), str(_SCRIPTS.parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "demo_training", *words], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ModelError(lines[-1] if lines else f"exit code {done.returncode}")
    report("trained", json.loads(done.stdout.strip().splitlines()[-1]))
