"""The command line: ``scripts/on_gpu``."""

from pathlib import Path
from typing import Annotated

import typer

from splitinfer.bench.gpu.parts import PARTS, chosen
from splitinfer.bench.gpu.run import GpuOptions, measure_on_gpu
from splitinfer.bench.gpu.sizes import SIZES
from splitinfer.core.json_text import dumps
from splitinfer.errors import ConfigError

_ON = ("auto", "gpu", "cpu")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def _one_of(known: tuple[str, ...], name: str, option: str) -> None:
    if name not in known:
        raise ConfigError(f"{option} is one of {', '.join(known)}, not {name!r}")


@app.command()
def on_gpu(
    on: Annotated[str, typer.Option(help="gpu, cpu, or auto: a GPU if there is one.")] = "auto",
    minutes: Annotated[float, typer.Option(min=0.05, help="At most, for everything.")] = 8.0,
    parts: Annotated[
        str | None,
        typer.Option(help=f"Some of {','.join(part.name for part in PARTS)}; all if not given."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The document's file; otherwise, the last line of output.")] = None,
    size: Annotated[
        str | None, typer.Option(help=f"{', '.join(SIZES)}; full on a GPU and small elsewhere, if not given.")
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="Emulate this machine file's devices on the CPU, as SPLITINFER_ACCELERATOR does.")
    ] = None,
    corpus: Annotated[Path | None, typer.Option(help="For demo: a folder with .txt files to learn from.")] = None,
    pair: Annotated[Path | None, typer.Option(help="For demo: the folder for the two models.")] = None,
) -> None:
    """Measure what only a GPU can show, in parts that do not depend on each other; one JSON document."""
    _one_of(_ON, on, "--on")
    if size is not None:
        _one_of(tuple(SIZES), size, "--size")
    found = measure_on_gpu(GpuOptions(chosen(parts), on, minutes, size, accelerator, out, corpus, pair))
    if out is None:
        typer.echo(dumps(found))


def main() -> None:
    """The entry point of ``python -m splitinfer.bench.gpu``."""
    try:
        app(prog_name="on_gpu")
    except ConfigError as error:
        typer.echo(f"on_gpu: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
