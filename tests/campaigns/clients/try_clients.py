"""Try the clients that are installed on a server, and print a line for each.

    python -m tests.campaigns.clients.try_clients                     # starts a scripted server
    python -m tests.campaigns.clients.try_clients --python VENV/bin/python --modules DIR  # clients elsewhere
    python -m tests.campaigns.clients.try_clients --only codex --record DIR  # keeps what it sends
    python -m tests.campaigns.clients.try_clients --url http://127.0.0.1:8080 --model NAME

The scripts in ``python/`` and ``node/`` try what each client can do; ``agents.py`` gives agents' command-line tools a
task. They want the answers of the scripted model (``scripted_server.py``): on another server, only what does not depend
on them passes. A script that needs several clients that cannot be installed together is tried with each ``--python``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from . import agents
from .recorder import recording
from .scripted_server import scripted_server

HERE = Path(__file__).resolve().parent
MISSING = ("ModuleNotFoundError", "ENOENT", "ERR_MODULE_NOT_FOUND", "PackageNotFoundError")


def main() -> int:
    """Try them; 1 if one of those that are installed failed."""
    options = _options()
    with ExitStack() as stack:
        url = options.url or stack.enter_context(scripted_server())
        if options.record is not None:
            url = stack.enter_context(recording(url, options.record))
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="splitinfer-agents-")))
        results = [*_scripts(options, url), *_agents(options, url, folder)]
    return int(not all(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs; without it one is started, with a scripted model")
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--python", action="append", help="an interpreter with clients; this one if none is given")
    parser.add_argument("--modules", type=Path, help="a folder with node_modules")
    parser.add_argument("--node", help="node; the one in --modules or in PATH if not given")
    parser.add_argument("--only", action="append", help="only the scripts or agents of this name; may be repeated")
    parser.add_argument("--record", type=Path, help="a folder for what is sent")
    parser.add_argument("--keep", type=Path, help="a folder for the agents' homes, work and output")
    parser.add_argument("--seconds", type=float, default=300, help="for each")
    return parser.parse_args()


def _scripts(options: argparse.Namespace, url: str) -> Iterator[bool]:
    pythons = options.python or [sys.executable]
    for script in sorted([*HERE.glob("python/*.py"), *HERE.glob("node/*.mjs")]):
        if script.stem == "probe" or (options.only and script.stem not in options.only):
            continue
        starts = [[python] for python in pythons] if script.suffix == ".py" else _nodes(options)
        yield _try_script(script, starts, options, url)


def _nodes(options: argparse.Namespace) -> list[list[str]]:
    if options.modules is None:
        return []
    own = options.modules / "node_modules" / ".bin" / "node"
    return [[options.node or (str(own) if own.exists() else "node")]]


def _try_script(script: Path, starts: Sequence[Sequence[str]], options: argparse.Namespace, url: str) -> bool:
    told = {"CLIENT_URL": url, "CLIENT_KEY": options.key, "CLIENT_MODEL": options.model}
    modules = {"CLIENT_MODULES": str(options.modules.resolve())} if options.modules else {}
    for start in starts:
        try:
            done = subprocess.run(
                [*start, str(script)], capture_output=True, text=True, timeout=options.seconds,
                env={**os.environ, **told, **modules},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{script.stem}: not done within {options.seconds:g} s", flush=True)
            return False
        if done.returncode and any(word in done.stderr for word in MISSING):
            continue
        return _said(script.stem, done)
    print(f"{script.stem}: not installed", flush=True)
    return True


def _said(name: str, done: "subprocess.CompletedProcess[str]") -> bool:
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        print(f"{name}: ended with {done.returncode}: {' '.join(done.stderr[-500:].split())}", flush=True)
        return False
    found = result["found"]
    failed = {ability: why for ability, why in found.items() if why is not None}
    print(f"{name} {result['version']}: {len(found) - len(failed)} of {len(found)}", flush=True)
    for ability, why in failed.items():
        print(f"    {ability}: {why}", flush=True)
    return not failed


def _agents(options: argparse.Namespace, url: str, folder: Path) -> Iterator[bool]:
    for name in agents.AGENTS:
        if options.only and name not in options.only:
            continue
        program = agents.found(name, options.modules)
        if program is None:
            print(f"{name}: not installed", flush=True)
            continue
        why = agents.try_agent(
            name, program, (folder / name).resolve(), url, options.key, options.model, options.seconds
        )
        print(f"{name}: {why or 'its task is done'}", flush=True)
        yield why is None


if __name__ == "__main__":
    sys.exit(main())
