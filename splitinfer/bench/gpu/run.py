"""Runs the parts one after the other and makes the document.

This process computes nothing and does not load MLX: whatever a device does to a job, the document is written. It is
written after each job, so that it is there whatever ends this process.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from splitinfer import cleanup
from splitinfer.bench.gpu.parts import HERE, Part
from splitinfer.bench.gpu.sizes import SIZES, Size
from splitinfer.core.json_text import dumps
from splitinfer.errors import ConfigError
from splitinfer.jobs.child import Outcome, problems, run_job
from splitinfer.jobs.job import Job, allotted, tails
from splitinfer.machine.selection import VARIABLE as ACCELERATOR

_ABOUT = 60.0  # seconds in which a device has to say what it is; the first look at a GPU takes some
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """The command line's options. ``on``: "auto", "gpu" or "cpu"; ``size``: ``None`` for what suits that."""

    parts: tuple[Part, ...]
    on: str = "auto"
    minutes: float = 8.0
    size: str | None = None
    accelerator: str | None = None
    out: Path | None = None
    corpus: Path | None = None
    pair: Path | None = None


@dataclass(slots=True)
class _Document:
    """What was found, as far as it is."""

    out: Path | None
    found: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        if self.out is None:
            return
        partial = self.out.with_name(f".{self.out.name}.partial")
        partial.write_text(dumps(self.found, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.out)


def measure_on_gpu(options: GpuOptions) -> dict[str, Any]:
    """Run the parts; the document.

    Raises:
        ConfigError: what should compute is not there, or the document cannot be written.
    """
    began = time.monotonic()
    ends = began + 60 * options.minutes
    document = _Document(options.out)
    _check_writable(document)
    environment = _environment(options)
    about = _about(options, environment, ends - began)
    name = options.size or ("full" if about["gpu"] else "small")
    _say(f"on {about['device']}, size {name}, at most {options.minutes:g} minutes")
    parts: dict[str, Any] = {}
    document.found |= {
        "on": about, "size": name, "minutes": options.minutes, "seconds": 0.0, "problems": [], "parts": parts,
    }  # fmt: skip
    with cleanup.temporary_folder("splitinfer-gpu-") as folder:
        more = {"folder": folder, "corpus": _text(options.corpus), "pair": _text(options.pair)}
        for part, weights in zip(options.parts, tails([part.weight for part in options.parts]), strict=True):
            limit = allotted(ends - time.monotonic(), weights, part.most)
            parts[part.name] = {"limit_s": round(limit, 1), "seconds": 0.0, "problem": None, "jobs": {}}
            _run_part(part, _jobs(part, SIZES[name], about, more), limit, environment, document)
    document.found["seconds"] = round(time.monotonic() - began, 1)
    document.write()
    return document.found


def _jobs(part: Part, size: Size, about: Mapping[str, Any], more: Mapping[str, Any]) -> Sequence[Job]:
    """A part's jobs, with what all have in common; none where it would say nothing."""
    if part.needs_gpu and not about["gpu"]:
        return ()
    return [Job(job.name, job.module, {**more, **job.options}, job.environment) for job in part.jobs(size)]


def _run_part(
    part: Part, jobs: Sequence[Job], limit: float, environment: Mapping[str, str], document: _Document
) -> None:
    """Run a part's jobs and write what they found."""
    began, own = time.monotonic(), document.found["parts"][part.name]
    if not jobs:
        own["problem"] = "left out: it needs a GPU"
        document.found["problems"].append(f"{part.name}: {own['problem']}")
    for job, weights in zip(jobs, tails([1.0] * len(jobs)), strict=True):
        outcome = run_job(job, allotted(limit - (time.monotonic() - began), weights), environment)
        _say(f"{part.name}, {job.name}: {_shortly(outcome)}")
        own["jobs"][job.name] = asdict(outcome)
        own["seconds"] = round(time.monotonic() - began, 1)
        for problem in problems(outcome):
            sentence = f"{job.name}: {problem}"
            own["problem"] = own["problem"] or sentence
            document.found["problems"].append(f"{part.name}, {sentence}")
        document.write()


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _shortly(outcome: Outcome) -> str:
    return "; ".join([f"{outcome.seconds:.1f} s", *problems(outcome)])


def _environment(options: GpuOptions) -> dict[str, str]:
    """Variables of all jobs."""
    found = dict(_NO_GPU) if options.on == "cpu" or options.accelerator else {}
    if options.accelerator:
        found[ACCELERATOR] = options.accelerator
    return found


def _about(options: GpuOptions, environment: Mapping[str, str], left: float) -> Mapping[str, Any]:
    """What computes.

    Raises:
        ConfigError: it is not what should compute, or says nothing.
    """
    outcome = run_job(Job("about", f"{HERE}.about"), min(_ABOUT, left), environment)
    if outcome.problem is not None:
        raise ConfigError(f"MLX does not say what it computes on: {outcome.problem}")
    found: Mapping[str, Any] = outcome.found["about"]
    if options.on == "gpu" and not found["gpu"]:
        raise ConfigError("MLX finds no GPU here: --on cpu measures the CPU backend (an NVIDIA card needs mlx[cuda13])")
    if (options.on == "cpu" or options.accelerator) and found["gpu"]:
        raise ConfigError("MLX computes on a GPU here and cannot be kept from it: leave --on cpu and --accelerator out")
    return found


def _check_writable(document: _Document) -> None:
    try:
        document.write()
    except OSError as error:
        raise ConfigError(f"{document.out} cannot be written: {error.strerror}") from error


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
