"""`splitinfer bench`: its options, and the measurement that ``--mode`` chooses."""

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from splitinfer.cli.options import ModelOption
from splitinfer.cli.running import finish, set_up


class Mode(StrEnum):
    """What `bench` measures: a module of ``splitinfer.bench`` each."""

    SPEED = "speed"
    COMPARE = "compare"
    LINK = "link"


def bench(
    layout: Annotated[
        str | None, typer.Option("--layout", help="A layout file, or the name of one. Not needed with --mode link.")
    ] = None,
    model: ModelOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="speed: one stream, many streams, a long prompt, a second turn, beside plain mlx-lm. compare: one "
            "table to share: also a killed worker, kept KV, mlx-lm's own pipeline, and whether answers are right. "
            "link: round trips beside bare ZeroMQ.",
        ),
    ] = Mode.SPEED,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Number of trials; of compare, at most.")] = 5,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Length of the long prompt; compare has its own.")
    ] = 2048,
    decode_tokens: Annotated[int, typer.Option("--decode-tokens", min=8, help="Tokens of each stream.")] = 64,
    streams: Annotated[
        str, typer.Option("--streams", help="Numbers of streams at once, as in 8,16,32; compare has 16.")
    ] = "16",
    minutes: Annotated[float, typer.Option("--minutes", min=1.0, help="With compare: how long it may take.")] = 15.0,
    report: Annotated[
        Path | None, typer.Option("--report", help="With compare: write the page to share to this file.")
    ] = None,
    ssh: Annotated[
        bool,
        typer.Option(
            "--ssh",
            help="With compare: start mlx-lm's own pipeline on the layout's machines by ssh. Each needs this Python "
            "environment and the whole model at the same paths.",
        ),
    ] = False,
) -> None:
    """Measure speed beside plain mlx-lm on the same work; the last line is one JSON document."""
    counts = _counts(streams)
    if layout is None and mode is not Mode.LINK:
        raise typer.BadParameter(f"--mode {mode} needs a layout: --layout FILE")
    if mode is not Mode.LINK:  # links do not compute
        from splitinfer.bench.machine import prefer_openblas

        prefer_openblas()  # may start this program anew, so before anything else
    set_up(verbose=False)
    from splitinfer.bench.options import Options
    from splitinfer.bench.report import print_found

    options = Options(
        layout=layout or "", model=model, trials=trials, prompt_tokens=prompt_tokens, decode_tokens=decode_tokens,
        streams=counts, minutes=minutes, report=report, ssh=ssh,
    )  # fmt: skip

    def run() -> int:
        module: Any = import_module(f"splitinfer.bench.{mode}")
        found = module.measure(options)
        print_found(found, module.tables(found))
        return 0

    finish(run, verbose=False)


def _counts(text: str) -> tuple[int, ...]:
    """The numbers of a comma-separated list, each once."""
    try:
        counts = tuple(dict.fromkeys(int(each) for each in text.split(",")))
        if min(counts) < 1:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"--streams takes numbers with commas between them, not {text!r}") from None
    return counts
