"""The parts of ``scripts/on_gpu``, their jobs, and how they share the time. Pure.

A *part* answers one question. Its *jobs* run in processes of their own, one after the other: a job that fails, ends its
process or overruns is reported, and the others go on. What a part or a job leaves of its time goes to those behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitinfer.bench.gpu.sizes import Size
from splitinfer.engine.device.launch_ahead import VARIABLE as LAUNCH_AHEAD
from splitinfer.errors import ConfigError
from splitinfer.jobs.job import Job

HERE = "splitinfer.bench.gpu"  # the modules of its jobs
_OPS, _MB = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
_LARGER = "400"  # operations or megabytes of a command buffer; MLX's own are 20 to 50, and 40 to 100
_NUM_SURVEYS = 5  # jobs of the survey: what ends one of them leaves the others


@dataclass(frozen=True, slots=True)
class Part:
    """A question.

    weight: its share of the time, in seconds of eight minutes.
    most: seconds that it may take at most; ``None``: whatever is left for it.
    needs_gpu: whether it says nothing elsewhere.
    jobs: for a size.
    """

    name: str
    weight: float
    jobs: Callable[[Size], Sequence[Job]]
    most: float | None = None
    needs_gpu: bool = False


def _support(size: Size) -> list[Job]:
    of = 1 if size.architectures else _NUM_SURVEYS
    options = {"names": size.architectures, "dtypes": size.support_dtypes, "of": of}
    return [Job(f"{i + 1} of {of}", f"{HERE}.support", {**options, "number": i}) for i in range(of)]


def _launch(size: Size) -> list[Job]:
    options = {"shape": size.launch, "layers": size.launch_layers, "bits": [0, 4], "steps": size.steps}
    buffers: tuple[dict[str, str], ...] = ({}, {_OPS: _LARGER}, {_MB: _LARGER}, {_OPS: _LARGER, _MB: _LARGER})
    names = [" ".join(f"{name}={value}" for name, value in variables.items()) for variables in buffers]
    found = [
        Job(name or "MLX's own buffers", f"{HERE}.launch", options, variables)
        for name, variables in zip(names, buffers, strict=True)
    ]
    groups = {"shape": size.folder, "streams": size.streams, "tokens": size.stream_tokens}
    found += [
        Job(f"two groups on two stages, {name}", f"{HERE}.groups", groups, variables)
        for name, variables in {"launching ahead": {}, "not launching ahead": {LAUNCH_AHEAD: "0"}}.items()
    ]
    return found


def _rows(size: Size) -> list[Job]:
    return [
        Job(name, f"{HERE}.rows", {"shape": shape, "sequences": size.sequences, "steps": size.row_steps})
        for name, shape in size.rows.items()
    ]


def _exact(size: Size) -> list[Job]:
    demo = {"mode": "exact", "words": size.exact}
    return [
        Job("a random model", f"{HERE}.commands", {**demo, "shape": size.exact_folder}),
        Job("demo", f"{HERE}.commands", demo),
    ]


def _kv(size: Size) -> list[Job]:
    return [Job("a random model", f"{HERE}.commands", {"mode": "kv", "words": size.kv, "shape": size.folder})]


def _send(size: Size) -> list[Job]:
    return [Job("a random model", f"{HERE}.send", {"shape": size.send, "rows": size.send_rows, "steps": size.steps})]


def _demo(size: Size) -> list[Job]:
    return [Job("a larger pair", f"{HERE}.demo", {"words": size.demo})]


PARTS = (
    Part("support", 110, _support),
    Part("launch", 110, _launch),
    Part("rows", 60, _rows),
    Part("exact", 60, _exact),
    Part("kv", 50, _kv),
    Part("send", 20, _send),
    Part("demo", 60, _demo, most=90.0, needs_gpu=True),
)


def chosen(names: str | None) -> tuple[Part, ...]:
    """The parts of a comma-separated list, in the order of ``PARTS``; all for ``None``.

    Raises:
        ConfigError: a name is of no part.
    """
    if names is None:
        return PARTS
    wanted = {name.strip() for name in names.split(",")}
    known = [part.name for part in PARTS]
    if unknown := sorted(wanted - set(known)):
        raise ConfigError(f"{unknown[0]!r} is none of the parts {', '.join(known)}")
    return tuple(part for part in PARTS if part.name in wanted)
