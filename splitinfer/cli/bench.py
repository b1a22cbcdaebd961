"""`splitinfer bench`: measuring."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from splitinfer.cli.options import (
    Budget,
    KVMemory,
    Lengths,
    ModelOption,
    Scale,
    Timeout,
    Tracing,
    Verbose,
    finite,
)
from splitinfer.cli.running import finish, set_up


class Mode(StrEnum):
    """What `bench` measures."""

    SPEED = "speed"
    KEPT = "kept"
    SPEC = "spec"
    SERVE = "serve"
    KV = "kv"
    WIRE = "wire"
    LINK = "link"


def bench(
    layout: Annotated[
        str | None,
        typer.Option("--layout", help="A layout file, or the name of one; every mode but link needs one."),
    ] = None,
    model: ModelOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="speed: decode, prompts, many at once. kept: what KV that is kept is worth. spec: drafts. "
            "serve: policies, while requests come. kv: KV in few bits. wire: hidden states in few bytes. "
            "link: round trips beside bare ZeroMQ.",
        ),
    ] = Mode.SPEED,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line, without the table.")] = False,
    trials: Annotated[int, typer.Option("--trials", min=1, help="How often everything is measured.")] = 5,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of the long prompt.")] = 2048,
    decode_tokens: Annotated[int, typer.Option("--decode-tokens", min=4, help="Tokens of the single stream.")] = 64,
    token_budget: Budget = None,
    baseline: Annotated[bool, typer.Option(help="Measure plain mlx-lm in one process, too.")] = True,
    whole: Annotated[bool, typer.Option("--whole", help="Measure splitinfer with one stage, too.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Where the random prompts come from.")] = 1,
    link_preset: Annotated[
        str | None, typer.Option("--link-preset", help="Emulate every link between stages: 1gbe, wifi, ...")
    ] = None,
    streams: Annotated[
        str, typer.Option("--streams", help="Sequences at once for each stage, as in 8,16,32; 0 leaves this out.")
    ] = "8",
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
            "--draft", help="With spec: 'replay', which is right as often as --acceptance says; or as for coord."
        ),
    ] = None,
    acceptance: Annotated[
        str, typer.Option("--acceptance", help="With replay: the shares of drafts that are right, as in 0,0.6,0.8.")
    ] = "0,0.6,0.8,0.9",
    text: Annotated[
        Path | None, typer.Option("--text", help="With spec and a draft model, kv and wire: a text to read.")
    ] = None,
    texts: Annotated[
        int, typer.Option("--texts", min=0, help="With wire: passages to read; 0 leaves the question out.")
    ] = 12,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="With spec and serve: draw the figures to this file (.png, .svg)."),
    ] = None,
    lengths: Lengths = None,
    scale: Scale = 1.0,
    requests: Annotated[int, typer.Option("--requests", min=2, help="With serve: how many come.")] = 40,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=1e-6,
            callback=finite,
            help="With serve: how many come in a second; what suits the machine if not given.",
        ),
    ] = None,
    kv_gb: KVMemory = None,
    connect_timeout: Timeout = 10.0,
    trace: Tracing = None,
    verbose: Verbose = False,
) -> None:
    """Measure speed, and its causes, beside plain mlx-lm on the same work; the last line is one JSON document."""
    counts = _counts(streams)
    if mode is Mode.LINK:
        _bench_links(as_json, trials, verbose)
    if layout is None:
        raise typer.BadParameter(f"--mode {mode} needs a layout: --layout FILE")
    from splitinfer.bench.shared.blas import prefer_openblas

    prefer_openblas()  # starts anew, so before anything else
    set_up(verbose)
    if mode is Mode.KEPT:
        from splitinfer.bench.prefix.run import PrefixOptions, measure_prefix

        kept = PrefixOptions(layout, model, as_json, trials, prompt_tokens, token_budget, seed)
        finish(lambda: measure_prefix(kept), verbose)
    if mode is Mode.SPEC:
        from splitinfer.bench.speculation.options import SpeculationOptions
        from splitinfer.bench.speculation.run import measure_spec

        spec = SpeculationOptions(
            layout, model, as_json, trials, decode_tokens, seed, link_preset, baseline, connect_timeout, draft,
            _shares(acceptance), text=text, plot=plot,
        )  # fmt: skip
        finish(lambda: measure_spec(spec), verbose)
    if mode is Mode.KV:
        from splitinfer.bench.kv.run import KVOptions, measure_kv

        kv = KVOptions(layout, model, as_json, trials, prompt_tokens, decode_tokens, seed, connect_timeout, text)
        finish(lambda: measure_kv(kv), verbose)
    if mode is Mode.WIRE:
        from splitinfer.bench.wire.run import WireOptions, measure_wire

        wire = WireOptions(
            layout, model, as_json, trials, prompt_tokens, token_budget, seed, connect_timeout, text, texts
        )
        finish(lambda: measure_wire(wire), verbose)
    if mode is Mode.SERVE:
        from splitinfer.bench.serving.run import ServingBenchOptions, measure_serve

        serve = ServingBenchOptions(
            layout, model, as_json, trials, prompt_tokens, max(counts, default=8), token_budget, seed, baseline,
            connect_timeout, lengths, scale, requests, rate,
            None if kv_gb is None else int(min(kv_gb, 1e9) * 1e9), plot,
        )  # fmt: skip
        finish(lambda: measure_serve(serve), verbose)
    from splitinfer.bench.speed.options import SpeedOptions
    from splitinfer.bench.speed.run import bench as measure

    options = SpeedOptions(
        layout, model, as_json, trials, prompt_tokens, decode_tokens, token_budget, baseline, whole, seed, link_preset,
        connect_timeout, trace, counts, stream_prompt_tokens, stream_tokens, peers,
    )  # fmt: skip
    finish(lambda: measure(options), verbose)


def _bench_links(as_json: bool, trials: int, verbose: bool) -> NoReturn:
    """Without a layout, and without MLX's BLAS."""
    set_up(verbose)
    from splitinfer.bench.link.run import LinkBenchOptions, measure_links

    finish(lambda: measure_links(LinkBenchOptions(as_json, trials)), verbose)


def _counts(text: str) -> tuple[int, ...]:
    """The n of a comma-separated list, each once; none for 0."""
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
