"""What the extra that sees costs where no picture is: ``python -m tests.campaigns.text_alone [--runs 7]``.

The demo model in processes of their own, by turns with mlx-vlm installed and with a folder of packages that lacks it:
seconds from the process's start until the model is ready, the most memory, and tokens a second. Medians; the last line
has how far they are apart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CHILD = """
import importlib.util, json, resource, sys, time
from splitinfer import LLM, SamplingParams
with LLM({"model": "demo", "stages": [{"name": "all", "layers": 12}]}) as llm:
    ready = time.time() - float(sys.argv[1])
    params = SamplingParams(max_tokens=int(sys.argv[2]), ignore_eos=True)
    llm.generate(["Once"], SamplingParams(max_tokens=8))
    began = time.perf_counter()
    num_tokens = len(llm.generate(["Once upon a time"], params)[0].token_ids)
    rate = num_tokens / (time.perf_counter() - began)
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([ready, most / 1024, rate, importlib.util.find_spec("mlx_vlm") is not None]))
"""
_FIGURES = ("start s", "memory MiB", "tokens/s")


def _packages(folder: Path, *, has_extra: bool) -> str:
    """A folder with links to what is installed."""
    folder.mkdir()
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if has_extra or not one.name.startswith("mlx_vlm"):
            (folder / one.name).symlink_to(one)
    return f"{ROOT}{os.pathsep}{folder}"


def _run(path: str, tokens: int) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-S", "-c", _CHILD, str(time.time()), str(tokens)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=300)
    asked = parser.parse_args()
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as name:
        paths = {has: _packages(Path(name) / str(has), has_extra=has) for has in found}
        for i in range(asked.runs + 1):
            for has in (True, False) if i % 2 else (False, True):
                figures = _run(paths[has], asked.tokens)
                if figures.pop() != has:
                    raise SystemExit(f"mlx-vlm is {'not ' * has}there")
                found[has] += [figures] * (i > 0)  # the first of each fills caches
    medians = {has: [statistics.median(column) for column in zip(*rows, strict=True)] for has, rows in found.items()}
    for has, words in ((False, "without"), (True, "with")):
        print(words, *(f"{name} {one:.3f}" for name, one in zip(_FIGURES, medians[has], strict=True)))
    print(
        *(f"{a}: {100 * (w / o - 1):+.2f} %" for a, w, o in zip(_FIGURES, medians[True], medians[False], strict=True))
    )


if __name__ == "__main__":
    main()
