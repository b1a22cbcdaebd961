"""`splitinfer bench`: its options, and the measurement that ``--mode`` chooses."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from splitinfer.cli.options import (
    Accelerator,
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
from splitinfer.core.scheduler.policy import PolicyName
from splitinfer.machine.selection import VARIABLE


class Mode(StrEnum):
    """What `bench` measures."""

    SPEED = "speed"
    PREFIX = "prefix"
    SPECULATION = "speculation"
    SERVE = "serve"
    KV = "kv"
    WIRE = "wire"
    LINK = "link"
    DEVICE = "device"
    EXACT = "exact"
    SERVER = "server"


def bench(
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="A layout file, or the name of one; link needs none, nor do device and server on an accelerator.",
        ),
    ] = None,
    model: ModelOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="speed: decode, prompts, many sequences at once. prefix: what the prefix cache is worth. "
            "speculation: drafts. serve: policies, while requests arrive. kv: quantised KV. wire: codecs for hidden "
            "states. link: round trips beside bare ZeroMQ. device: what the loops leave of a device's time. exact: the "
            "first token at which other ways to compute part. server: streams over HTTP beside the library's.",
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
        typer.Option("--plot", help="With speculation and serve: draw the figures to this file (.png, .svg)."),
    ] = None,
    lengths: Lengths = None,
    scale: Scale = 1.0,
    requests: Annotated[int, typer.Option("--requests", min=2, help="With serve: number of requests.")] = 40,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=1e-6,
            callback=finite,
            help="With serve: requests a second; what suits the machine if not given.",
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option("--policies", help="With serve: only these, as in stall_free,prefill_first; all if not given."),
    ] = "",
    kv_gb: KVMemory = None,
    connect_timeout: Timeout = 10.0,
    trace: Tracing = None,
    accelerator: Accelerator = None,
    verbose: Verbose = False,
) -> None:
    """Measure speed, and its causes, beside plain mlx-lm on the same work; the last line is one JSON document."""
    counts = _counts("8" if streams is None else streams)
    if mode is Mode.LINK:
        _bench_links(as_json, trials, verbose)
    _emulate(accelerator)
    sizes = ((counts or (16,))[0] if streams else 16, stream_prompt_tokens, stream_tokens)
    _bench_stand_ins(mode, (layout, model, as_json, trials), sizes, (seed, connect_timeout), verbose)
    usual = (layout, model, as_json, trials, decode_tokens, seed, connect_timeout)
    _bench_several(mode, streams, usual, _shares(acceptance), counts, come_and_go, verbose)
    if layout is None:
        raise typer.BadParameter(f"--mode {mode} needs a layout: --layout FILE")
    if mode is Mode.EXACT:
        exact = (layout, model, as_json, trials, prompt_tokens, decode_tokens, seed, text)
        _bench_exact(exact, verbose)
    _start(verbose)
    if mode is Mode.PREFIX:
        from splitinfer.bench.prefix.run import PrefixOptions, measure_prefix

        prefix = PrefixOptions(layout, model, as_json, trials, prompt_tokens, token_budget, seed)
        finish(lambda: measure_prefix(prefix), verbose)
    if mode is Mode.SPECULATION:
        from splitinfer.bench.speculation.options import SpeculationOptions
        from splitinfer.bench.speculation.run import measure_speculation

        speculation = SpeculationOptions(
            layout, model, as_json, trials, decode_tokens, seed, link_preset, baseline, connect_timeout, draft,
            _shares(acceptance), text=text, plot=plot,
        )  # fmt: skip
        finish(lambda: measure_speculation(speculation), verbose)
    if mode is Mode.KV:
        from splitinfer.bench.kv import KVOptions, measure_kv

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
            None if kv_gb is None else int(min(kv_gb, 1e9) * 1e9), plot, _policies(policies),
        )  # fmt: skip
        finish(lambda: measure_serve(serve), verbose)
    from splitinfer.bench.speed.options import SpeedOptions
    from splitinfer.bench.speed.run import bench as measure

    options = SpeedOptions(
        layout, model, as_json, trials, prompt_tokens, decode_tokens, token_budget, baseline, whole, seed, link_preset,
        connect_timeout, trace, counts, stream_prompt_tokens, stream_tokens, peers,
    )  # fmt: skip
    finish(lambda: measure(options), verbose)


def _emulate(accelerator: Path | None) -> None:
    """Have stages compute on an emulated accelerator, if there is one to be."""
    if accelerator is not None:
        os.environ[VARIABLE] = str(accelerator)


def _start(verbose: bool) -> None:
    """Start anew with OpenBLAS where there is one."""
    from splitinfer.bench.shared.blas import prefer_openblas

    prefer_openblas()  # may start this program anew, so before anything else
    set_up(verbose)


def _bench_links(as_json: bool, trials: int, verbose: bool) -> NoReturn:
    """Measure links, which takes neither a layout nor MLX's BLAS."""
    set_up(verbose)
    from splitinfer.bench.link import LinkBenchOptions, measure_links

    finish(lambda: measure_links(LinkBenchOptions(as_json, trials)), verbose)


def _bench_exact(options: tuple[str, str | None, bool, int, int, int, int, Path | None], verbose: bool) -> NoReturn:
    """Compare roads on the BLAS that every other command has here."""
    set_up(verbose)
    from splitinfer.bench.exact import ExactOptions, measure_exact

    finish(lambda: measure_exact(ExactOptions(*options)), verbose)


def _bench_stand_ins(
    mode: Mode,
    options: tuple[str | None, str | None, bool, int],
    sizes: tuple[int, int, int],
    more: tuple[int, float],
    verbose: bool,
) -> None:
    """Measure the loops on an emulated accelerator, or streams over HTTP, where that is the mode."""
    if mode not in (Mode.DEVICE, Mode.SERVER):
        return
    _start(verbose)
    if mode is Mode.DEVICE:
        from splitinfer.bench.device import DeviceOptions, measure_device

        finish(lambda: measure_device(DeviceOptions(*options, *more)), verbose)
    from splitinfer.bench.server.run import ServerBenchOptions, measure_server

    finish(lambda: measure_server(ServerBenchOptions(*options, *sizes, *more)), verbose)


def _bench_several(
    mode: Mode,
    streams: str | None,
    options: tuple[str | None, str | None, bool, int, int, int, float],
    shares: tuple[float, ...],
    counts: tuple[int, ...],
    seconds: float,
    verbose: bool,
) -> None:
    """Measure drafts for several streams, where that is the mode and numbers of streams were given."""
    if mode is not Mode.SPECULATION or streams is None:
        return
    _start(verbose)
    from splitinfer.bench.speculation.options import SpeculationOptions
    from splitinfer.bench.speculation.several import measure_several

    layout, model, as_json, trials, tokens, seed, timeout = options
    asked = SpeculationOptions(
        layout, model, as_json, trials, tokens, seed, None, False, timeout, acceptances=shares, streams=counts,
        come_and_go=seconds,
    )  # fmt: skip
    finish(lambda: measure_several(asked), verbose)


def _counts(text: str) -> tuple[int, ...]:
    """The numbers of a comma-separated list, each once and without 0."""
    try:
        counts = tuple(dict.fromkeys(int(each) for each in text.split(",")))
        if min(counts) < 0:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"--streams takes numbers with commas between them, not {text!r}") from None
    return tuple(count for count in counts if count > 0)


def _policies(text: str) -> tuple[str, ...]:
    """Names of policies with commas between them."""
    names = tuple(name for name in text.split(",") if name)
    if unknown := [name for name in names if name not in tuple(PolicyName)]:
        raise typer.BadParameter(f"--policies takes {', '.join(PolicyName)}, not {unknown[0]!r}")
    return names


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
