"""``scripts/on_gpu``: what a GPU could show, in some minutes, as one JSON document.

A *part* answers one question by one or more probes, each in a process of its own. This process computes nothing and
does not load MLX. The document is written after each probe, so that it is there whatever ends this process.

Sizes: ``full`` is for a card of 80 GB or more: the largest model, 80 layers in bfloat16, takes 45 GB. ``small`` takes
the CPU backend a few minutes, which shows that everything runs, and nothing about a GPU. ``tiny`` is for tests.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from splitinfer import cleanup
from splitinfer.common.json_text import dumps
from splitinfer.errors import ConfigError
from splitinfer.machine.selection import VARIABLE as ACCELERATOR
from splitinfer.places import write
from splitinfer.probes.child import ProbeResult, run_probe, run_probes
from splitinfer.probes.finding import Blame, Finding, Outcome
from splitinfer.probes.registry import ABOUT, ProbeEntry

PARTS = ("support", "launch", "rows", "send", "rules")
_ON, _SIZES = ("auto", "gpu", "cpu"), ("full", "small", "tiny")
_ABOUT_SECONDS = 60.0  # in which a device has to say what it is; the first look at a GPU takes some
_OPS, _MB = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
_LARGER = "400"  # operations or megabytes of a command buffer; MLX's own are 20 to 50, and 40 to 100
_SURVEYS = 5  # probes of the survey: what ends one of them leaves the others


# -- probes ------------------------------------------------------------------------------------------------------------


def gpu_probes(size: str, parts: Sequence[str] = PARTS) -> tuple[ProbeEntry, ...]:
    """The probes of some parts, in order. The weights are seconds of eight minutes."""
    made = {
        "support": _support,
        "launch": _launch,
        "rows": _rows,
        "send": _send,
        "rules": _rules,
    }
    return tuple(probe for part in PARTS if part in parts for probe in made[part](_SIZES.index(size)))


def _probe(part: str, name: str, function: str, weight: float, options: Mapping[str, Any], **more: Any) -> ProbeEntry:
    return ProbeEntry(f"{part}, {name}", part, f"gpu_figures.{function}", Blame.DEVICE, weight, options, **more)


def _model(layers: int, hidden: int, mlp: int, vocab: int, **more: Any) -> dict[str, Any]:
    heads = max(2, hidden // 128)
    return {
        "architecture": "qwen3", "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": max(1, heads // 4),
        "mlp": mlp, "vocab": vocab, "dtype": "bfloat16", **more,
    }  # fmt: skip


def _support(size: int) -> list[ProbeEntry]:
    names, of = ((), (), ("llama", "qwen3_moe"))[size], (_SURVEYS, _SURVEYS, 1)[size]
    options = {"names": names, "dtypes": ("float32", "bfloat16")[: 2 if size == 0 else 1], "of": of}
    return [
        _probe("support", f"{i + 1} of {of}", "support:measure", 110 / of, {**options, "number": i}) for i in range(of)
    ]


def _launch(size: int) -> list[ProbeEntry]:
    model = (_model(80, 5120, 13824, 32000), _model(8, 128, 384, 512), _model(2, 64, 128, 300))[size]
    layers = ((10, 40, 80), (1, 4, 8), (1, 2))[size]
    options = {"shape": model, "layers": layers, "bits": (0, 4), "steps": (40, 12, 3)[size]}
    buffers: tuple[dict[str, str], ...] = ({}, {_OPS: _LARGER}, {_MB: _LARGER}, {_OPS: _LARGER, _MB: _LARGER})
    names = [" ".join(f"{name}={value}" for name, value in variables.items()) for variables in buffers]
    return [
        _probe("launch", name or "MLX's own buffers", "measures:launch", 18, options, environment=variables)
        for name, variables in zip(names, buffers, strict=True)
    ]


def _rows(size: int) -> list[ProbeEntry]:
    layers, hidden, mlp, vocab, experts, expert_mlp = (
        (40, 2048, 5632, 8192, 64, 768), (4, 128, 384, 512, 8, 64), (2, 64, 128, 300, 4, 64)
    )[size]  # fmt: skip
    models = {
        "dense": _model(layers, hidden, mlp, vocab),
        "experts": _model(layers, hidden, expert_mlp, vocab, experts=experts, experts_per_token=max(2, experts // 8)),
    }
    options = {"sequences": ((2, 4, 8, 16, 32), (2, 8), (3,))[size], "steps": (16, 4, 2)[size]}
    return [
        _probe("rows", f"{name}, {bits}", "measures:rows", 15, {**options, "shape": {**model, **more}})
        for name, model in models.items()
        for bits, more in (("bfloat16", {}), ("4-bit", {"bits": 4}))
    ]


def _send(size: int) -> list[ProbeEntry]:
    model = (_model(40, 4096, 11008, 32000), _model(8, 128, 384, 512), _model(3, 64, 128, 300))[size]
    options = {"shape": model, "rows": (8, 4, 3)[size], "steps": (40, 12, 3)[size]}
    return [_probe("send", "a random model", "measures:send", 20, options)]


def _rules(size: int) -> list[ProbeEntry]:
    options = {"size": (2**24, 2**16, 2**10)[size], "rounds": (50, 10, 2)[size]}
    return [_probe("rules", "arrays that others use", "measures:rules", 5, options)]


# -- the run -----------------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def on_gpu(
    on: Annotated[str, typer.Option(help="gpu, cpu, or auto: a GPU if there is one.")] = "auto",
    minutes: Annotated[float, typer.Option(min=0.05, help="At most, for everything.")] = 8.0,
    parts: Annotated[str, typer.Option(help="Some of these.")] = ",".join(PARTS),
    out: Annotated[Path | None, typer.Option(help="The document's file; otherwise, the last line of output.")] = None,
    size: Annotated[
        str | None, typer.Option(help=f"{', '.join(_SIZES)}; full on a GPU and small elsewhere, if not given.")
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="Emulate this machine file's devices on the CPU, as SPLITINFER_ACCELERATOR does.")
    ] = None,
) -> None:
    """Measure what only a GPU can show, in parts that do not depend on each other; one JSON document."""
    wanted = tuple(part.strip() for part in parts.split(","))
    for option, given, known in (("--on", [on], _ON), ("--size", [size or "full"], _SIZES), ("--parts", wanted, PARTS)):
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"{option} takes {', '.join(known)}, not {unknown[0]!r}")
    found = measure_on_gpu(wanted, on=on, minutes=minutes, size=size, accelerator=accelerator, out=out)
    if out is None:
        typer.echo(dumps(found))


def measure_on_gpu(
    parts: Sequence[str] = PARTS,
    *,
    on: str = "auto",
    minutes: float = 8.0,
    size: str | None = None,
    accelerator: str | None = None,
    out: Path | None = None,
    run: Any = run_probe,
) -> dict[str, Any]:
    """Run the parts; the document. ``run``: runs one probe.

    Raises:
        ConfigError: what should compute is not there, or the document cannot be written.
    """
    began = time.monotonic()
    _write(out, {})
    environment = {"CUDA_VISIBLE_DEVICES": ""} if on == "cpu" or accelerator else {}
    if accelerator:
        environment[ACCELERATOR] = accelerator
    about = _about(run(ABOUT, min(_ABOUT_SECONDS, 60 * minutes), environment=environment), on, accelerator)
    name = size or ("full" if about["gpu"] else "small")
    _say(f"on {about['device']}, size {name}, at most {minutes:g} minutes")
    found: dict[str, Any] = {"on": about, "size": name, "minutes": minutes, "seconds": 0.0, "problems": [], "parts": {}}

    def after(probe: ProbeEntry, results: Mapping[str, ProbeResult]) -> None:
        found["parts"] = {each: _document(result) for each, result in results.items()}
        found["problems"] = [f"{each}: {line}" for each, result in results.items() for line in problems(result)]
        found["seconds"] = round(time.monotonic() - began, 1)
        _write(out, found)
        _say(f"{probe.name}: " + "; ".join([f"{results[probe.name].seconds:.1f} s", *problems(results[probe.name])]))

    with cleanup.temporary_folder("splitinfer-gpu-") as folder:
        left = 60 * minutes - (time.monotonic() - began)
        run_probes(gpu_probes(name, parts), left, folder, run, after, environment=environment)
    return found


def _about(result: ProbeResult, on: str, accelerator: str | None) -> Mapping[str, Any]:
    """What computes.

    Raises:
        ConfigError: it is not what should compute, or says nothing.
    """
    found = result.numbers("device")
    if found is None:
        why = "; ".join(each.sentence for each in result.findings)
        raise ConfigError(f"MLX does not say what it computes on: {why}")
    if on == "gpu" and not found["gpu"]:
        raise ConfigError("MLX finds no GPU here: --on cpu measures the CPU backend (an NVIDIA card needs mlx[cuda13])")
    if (on == "cpu" or accelerator) and found["gpu"]:
        raise ConfigError("MLX computes on a GPU here and cannot be kept from it: leave --on cpu and --accelerator out")
    return found


def _document(result: ProbeResult) -> dict[str, Any]:
    """What a probe found, by name: numbers, or what is wrong."""
    return {
        "limit_s": result.limit_s,
        "seconds": result.seconds,
        "problem": next(iter(problems(result)), None),
        "found": {each.name: {"problem": each.sentence} if _is_broken(each) else each.numbers for each in result.found},
    }


def problems(result: ProbeResult) -> list[str]:
    """Why a probe did not come to its end, and those of single findings together, each in one sentence."""
    broken = [each for each in result.found if _is_broken(each)]
    sentences = [] if result.ending is None else [result.ending.sentence]
    if broken:
        first = f"the first, {broken[0].name}, by: {broken[0].sentence}"
        sentences.append(f"{len(broken)} of {len(result.found)} findings failed, {first}")
    return sentences


def _is_broken(finding: Finding) -> bool:
    return finding.outcome is Outcome.FAILED and not finding.numbers


def _write(path: Path | None, found: Mapping[str, Any]) -> None:
    if path is not None:
        write(path, dumps(found, indent=1) + "\n")


def _say(text: str) -> None:
    typer.echo(text, err=True)


def main() -> None:
    try:
        app(prog_name="on_gpu")
    except ConfigError as error:
        _say(f"on_gpu: {error}")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
