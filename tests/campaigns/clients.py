"""Libraries that people call a server with, on a scripted model.

    python -m tests.campaigns clients --python VENV/bin/python      # where litellm, for example, is installed

The scripts in ``libraries/`` try what each can do: streams, a round trip of tools, reasoning, errors. `openai` and
`anthropic` are tried in every run (``server/test_conformance.py``, ``server/test_answers.py``), and so is what agents
were recorded to send (``cluster/test_serve.py``). The order is drawn by the seed, and all are tried again while there
is time; the server keeps their KV meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scripted

from .libraries.probe import ANSWER, TALE, THOUGHT
from .report import Missing, Report
from .serving import serving

LIBRARIES = Path(__file__).resolve().parent / "libraries"
SCRIPTS = ("litellm_client", "ollama_client")


MISSING = ("ModuleNotFoundError", "PackageNotFoundError")
_SECONDS = 300.0  # for a script
_CONTEXT = 65536
_SEED = 3  # of the model's weights: with them an answer in a form opens no reasoning, which it could not close


def scripts() -> scripted.Scripts:
    """What the model answers."""
    weather = scripted.call("get_weather", THOUGHT, "One moment. ", city="Oslo")
    return {"get_weather": [weather, ANSWER], scripted.PLAIN: [TALE]}


# -- libraries -------------------------------------------------------------------------------------


def try_script(name: str, pythons: Sequence[str], url: str) -> dict[str, Any] | None:
    """What a script found: the library's version, and by ability why it failed, if it did; ``None``: no interpreter has
    the library."""
    told = {"CLIENT_URL": url, "CLIENT_KEY": "none", "CLIENT_MODEL": "scripted"}
    for python in pythons:
        command = [python, str(LIBRARIES / f"{name}.py")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env={**os.environ, **told})
        except subprocess.TimeoutExpired:
            return {"version": "?", "found": {"all": f"not done within {_SECONDS:g} s"}}
        if done.returncode and any(word in done.stderr for word in MISSING):
            continue
        try:
            result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            return {"version": "?", "found": {"all": f"it ended with {done.returncode}: {done.stderr[-500:]}"}}
        return result
    return None


# -- the campaign ----------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", action="append", help="an interpreter with clients; this one if none is given")
    parser.add_argument("--only", choices=SCRIPTS)


def campaign(report: Report, given: argparse.Namespace) -> None:
    pythons = given.python or [sys.executable]
    tries = [name for name in SCRIPTS if given.only in (None, name)]
    abilities, absent, versions = Counter[str](), set[str](), dict[str, str]()
    model = scripted.save(report.folder / "scripted", scripts(), seed=_SEED)
    wanted = ("--model-name", "scripted")
    with serving(*wanted, model=str(model), layers=scripted.LAYERS, context=_CONTEXT) as server:
        report.begin()
        for number in report.numbers():
            for name in report.chance(number).sample(tries, len(tries)):
                if (tried := try_script(name, pythons, server.url)) is None:
                    absent.add(name)
                    continue
                versions[name], failed = tried["version"], tried["found"]
                abilities[name] += len(failed)
                report.expect_none(f"{name}: {ability}: {why}" for ability, why in failed.items() if why)
            if not abilities:
                break
        report.expect_none(server.left())
    if not abilities:
        raise Missing(f"not installed here: {', '.join(sorted(absent))}")
    report.figures |= {"tried": abilities, "versions": versions, "not_installed": sorted(absent)}
