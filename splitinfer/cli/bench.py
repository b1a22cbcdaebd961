"""`splitinfer bench`: its options, and the measurement that ``--mode`` chooses."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from splitinfer.cli.options import (
    Budget,
    ModelOption,
    Timeout,
    Tracing,
    Verbose,
)
from splitinfer.cli.running import finish, set_up


class Mode(StrEnum):
    """What `bench` measures."""

    SPEED = "speed"
    PREFIX = "prefix"
    SPECULATION = "speculation"
    KV = "kv"
    WIRE = "wire"
    LINK = "link"
    EXACT = "exact"
    COMPARE = "compare"
    SERVER = "server"


def bench(
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="A layout file, or the name of one; link needs none.",
        ),
    ] = None,
    model: ModelOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="speed: decode, prompts, many sequences at once. prefix: what the prefix cache is worth. "
            "speculation: drafts. kv: quantised KV. wire: codecs for hidden states. link: round trips beside bare "
            "ZeroMQ. exact: the first token at which other ways to compute part. server: streams over HTTP beside the "
            "library's. compare: one table to share: speed, kept KV, a killed worker, right or wrong, beside mlx-lm's "
            "own ways.",
        ),
    ] = Mode.SPEED,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line, without the table.")] = False,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Number of trials.")] = 5,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of the long prompt.")] = 2048,
    decode_tokens: Annotated[int, typer.Option("--decode-tokens", min=4, help="Tokens of the single stream.")] = 64,
    token_budget: Budget = None,
    baseline: Annotated[bool, typer.Option(help="Measure plain mlx-lm in one process, too.")] = True,
    whole: Annotated[bool, typer.Option("--whole", help="Measure splitinfer with one stage, too.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random prompts.")] = 1,
    link_preset: Annotated[
        str | None, typer.Option("--link-preset", help="Emulate every link between stages: 1gbe, wifi, ...")
    ] = None,
    streams: Annotated[
        str | None,
        typer.Option(
            "--streams",
            help="Sequences at once for each stage, as in 8,16,32 (by default 8); 0 leaves this out. With speculation: "
            "streams to draft for at once, in all.",
        ),
    ] = None,
    come_and_go: Annotated[
        float,
        typer.Option(
            "--come-and-go", min=0.0, help="With speculation and --streams: seconds of requests that come and go."
        ),
    ] = 0.0,
    stream_prompt_tokens: Annotated[
        int, typer.Option("--stream-prompt-tokens", min=1, help="Length of each of their prompts.")
    ] = 128,
    stream_tokens: Annotated[int, typer.Option("--stream-tokens", min=5, help="Tokens of each of them.")] = 64,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Measure mlx-lm's own pipeline and mlx-lm on all processors with --streams, too."),
    ] = False,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="With speculation: 'replay', which is right as often as --acceptance says; or as for coord.",
        ),
    ] = None,
    acceptance: Annotated[
        str, typer.Option("--acceptance", help="With replay: the shares of drafts that are right, as in 0,0.6,0.8.")
    ] = "0,0.6,0.8,0.9",
    text: Annotated[
        Path | None,
        typer.Option("--text", help="With speculation and a draft model, kv, wire and exact: a text to read."),
    ] = None,
    texts: Annotated[
        int, typer.Option("--texts", min=0, help="With wire: passages to read; 0 leaves fidelity out.")
    ] = 12,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="With speculation: draw the figures to this file (.png, .svg)."),
    ] = None,
    connect_timeout: Timeout = 10.0,
    minutes: Annotated[float, typer.Option("--minutes", min=1.0, help="With compare: how long it may take.")] = 15.0,
    report: Annotated[
        Path | None, typer.Option("--report", help="With compare: write the page to share, with plots, to this file.")
    ] = None,
    ssh: Annotated[
        bool,
        typer.Option(
            help="With compare: start mlx-lm's own pipeline on the layout's machines by ssh. Each needs this Python "
            "environment and the whole model at the same paths."
        ),
    ] = False,
    trace: Tracing = None,
    verbose: Verbose = False,
) -> None:
    """Measure speed, and its causes, beside plain mlx-lm on the same work; the last line is one JSON document."""
    counts, shares = None if streams is None else _counts(streams), _shares(acceptance)
    name = "several" if mode is Mode.SPECULATION and counts else mode.value
    if layout is None and mode is not Mode.LINK:
        raise typer.BadParameter(f"--mode {mode} needs a layout: --layout FILE")
    if mode not in (Mode.LINK, Mode.EXACT):  # links do not compute; exact computes as every other command does
        from splitinfer.bench.shared.blas import prefer_openblas

        prefer_openblas()  # may start this program anew, so before anything else
    set_up(verbose)
    from splitinfer.bench.modes import measure
    from splitinfer.bench.shared.options import Options

    options = Options(
        layout=layout or "", model=model, as_json=as_json, trials=trials, prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens, token_budget=token_budget, baseline=baseline, whole=whole, seed=seed,
        link_preset=link_preset, streams=counts, come_and_go=come_and_go, stream_prompt_tokens=stream_prompt_tokens,
        stream_tokens=stream_tokens, peers=peers, draft=draft, acceptances=shares, text=text, texts=texts, plot=plot,
        connect_timeout=connect_timeout, trace=trace, minutes=minutes, report=report, ssh=ssh,
    )  # fmt: skip
    finish(lambda: measure(name, options), verbose)


def _counts(text: str) -> tuple[int, ...]:
    """The numbers of a comma-separated list, each once and without 0."""
    try:
        counts = tuple(dict.fromkeys(int(each) for each in text.split(",")))
        if min(counts) < 0:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"--streams takes numbers with commas between them, not {text!r}") from None
    return tuple(count for count in counts if count > 0)


def _shares(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1 with commas between them."""
    try:
        shares = tuple(float(each) for each in text.split(","))
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"--acceptance takes numbers from 0 to 1 with commas between them, not {text!r}"
        ) from None
    return shares
