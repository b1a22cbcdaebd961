"""The command line: parse, build settings, call one function; errors become one sentence.

Exit codes: 0 done, 1 it could not be done (the sentence says why), 2 a wrong option, 130 Ctrl-C, 143 SIGTERM
(after the answer under way, if that ends soon: `show.DRAIN_SECONDS`).
Answers go to standard output; everything else goes to standard error.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from splitinfer.cli_cache import cache_app
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import ConfigError, SplitinferError
from splitinfer.kvstore.place import DEFAULT_CAP, default_folder

if TYPE_CHECKING:
    from splitinfer.kvstore.store import Disk

DEFAULT_PORT = 5577
_MOST_GB = 1e9  # for whoever says "inf"
_SWITCH = 0.0005  # seconds a thread that brings a frame may wait for Python's lock; by default as long as 5 ms

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Mode(StrEnum):
    """What `bench` measures."""

    SPEED = "speed"
    KEPT = "kept"
    SPEC = "spec"


LayoutOption = Annotated[
    str, typer.Option("--layout", help="A layout file, or the name of one (see layouts/README.md).")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Hub id, folder or 'demo'; overrides the layout's model.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer, at most.")]
Temp = Annotated[float, typer.Option("--temp", help="Temperature; 0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens that hold this probability.")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample from the k likeliest tokens; 0 is off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Leave out tokens less likely than this share of the likeliest.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Over 1 discourages the last 20 tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End the answer before this text; may be repeated.")]
Budget = Annotated[
    int | None,
    typer.Option(
        "--token-budget",
        "--chunk",
        min=1,
        help="Tokens in one step, prompts and answers together; 512 on a GPU and 128 else if not given.",
    ),
]
KVMemory = Annotated[
    float | None,
    typer.Option("--kv-gb", min=0, help="GB for KV on each stage; half of what is free if not given."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context", min=1, help="Tokens of a prompt and its answer together; 8,192 or the model's own if not given."
    ),
]
DraftName = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Who guesses tokens ahead: a small model of the same tokenizer, 'ngram', 'none'; or the layout's.",
    ),
]
Timeout = Annotated[float, typer.Option("--connect-timeout", min=0.1, help="Seconds to reach a worker.")]
Rejoin = Annotated[
    float,
    typer.Option("--rejoin-timeout", min=0, help="Seconds to wait for a lost worker to come back; 0 gives up at once."),
]
Tracing = Annotated[
    Path | None, typer.Option("--trace", help="Write a picture of every step to this file, for ui.perfetto.dev.")
]
KVDir = Annotated[
    str | None,
    typer.Option(
        "--kv-dir",
        help="Folder where KV is kept for later; in your cache folder if not given; 'none': in memory only.",
    ),
]
KVDirSize = Annotated[
    float, typer.Option("--kv-disk-gb", min=0, help="GB that folder may hold; the least recently used goes first.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log more, and show an error's traceback.")]


@app.command()
def coord(
    layout: LayoutOption,
    model: ModelOption = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this and end.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Open the REPL, also where there is no terminal.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show speed and load of the stages, live.")] = False,
    max_tokens: MaxTokens = 256,
    temp: Temp = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="With --json: log probabilities of the n likeliest.")
    ] = None,
    token_budget: Budget = None,
    context: Context = None,
    draft: DraftName = None,
    kv_gb: KVMemory = None,
    kv_dir: KVDir = None,
    kv_disk_gb: KVDirSize = DEFAULT_CAP / 1e9,
    connect_timeout: Timeout = 10.0,
    rejoin_timeout: Rejoin = 60.0,
    trace: Tracing = None,
    verbose: Verbose = False,
) -> None:
    """Hold the first layers, reach the workers, then chat or answer."""
    params = _params(max_tokens, temp, top_p, top_k, min_p, repetition_penalty, seed, stop, logprobs)
    _set_up(verbose)
    disk = _disk(kv_dir, kv_disk_gb)
    _start_workers(layout, disk)
    from splitinfer.answer import answer
    from splitinfer.chat import run_chat
    from splitinfer.llm import Settings
    from splitinfer.show import open_llm

    settings = Settings(
        token_budget=token_budget,
        context=context,
        draft=draft,
        kv_bytes=None if kv_gb is None else _bytes(kv_gb),
        kv_dir=None if disk is None else disk.path,
        kv_dir_bytes=_bytes(kv_disk_gb),
        connect_timeout=connect_timeout,
        rejoin_timeout=rejoin_timeout,
        trace=trace,
    )

    def run() -> int:
        text = _prompt_text(prompt, chat)
        with open_llm(layout, model, settings) as llm:
            if text is None:
                return run_chat(llm, params)
            return answer(llm, text, params, raw=raw, as_json=as_json, status=status)

    _finish(run, verbose)


@app.command()
def chat(
    layout: LayoutOption,
    model: ModelOption = None,
    max_tokens: MaxTokens = 512,
    temp: Temp = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    token_budget: Budget = None,
    context: Context = None,
    draft: DraftName = None,
    kv_gb: KVMemory = None,
    kv_dir: KVDir = None,
    kv_disk_gb: KVDirSize = DEFAULT_CAP / 1e9,
    connect_timeout: Timeout = 10.0,
    rejoin_timeout: Rejoin = 60.0,
    trace: Tracing = None,
    verbose: Verbose = False,
) -> None:
    """Open the REPL: what `coord` does on a terminal."""
    params = _params(max_tokens, temp, top_p, top_k, min_p, repetition_penalty, seed, None, None)
    _set_up(verbose)
    disk = _disk(kv_dir, kv_disk_gb)
    _start_workers(layout, disk)
    from splitinfer.chat import run_chat
    from splitinfer.llm import Settings
    from splitinfer.show import open_llm

    settings = Settings(
        token_budget=token_budget,
        context=context,
        draft=draft,
        kv_bytes=None if kv_gb is None else _bytes(kv_gb),
        kv_dir=None if disk is None else disk.path,
        kv_dir_bytes=_bytes(kv_disk_gb),
        connect_timeout=connect_timeout,
        rejoin_timeout=rejoin_timeout,
        trace=trace,
    )

    def run() -> int:
        with open_llm(layout, model, settings) as llm:
            return run_chat(llm, params)

    _finish(run, verbose)


@app.command()
def worker(
    host: Annotated[str, typer.Option("--host", help="Interface to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = DEFAULT_PORT,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Where the model lies on this machine, if not where the coordinator says."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What to call this worker; the machine's name if not given.")
    ] = None,
    kv_dir: KVDir = None,
    kv_disk_gb: KVDirSize = DEFAULT_CAP / 1e9,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    verbose: Verbose = False,
) -> None:
    """Wait for a coordinator, hold the layers it names, and serve one coordinator after another."""
    _set_up(verbose, info=True)
    from splitinfer.serve import serve

    disk = _disk(kv_dir, kv_disk_gb)
    at = ("127.0.0.1", 0) if child else (host, port)
    _finish(lambda: serve(*at, name=name, model=model, child=child, disk=disk), verbose)


@app.command()
def bench(
    layout: LayoutOption,
    model: ModelOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode", help="speed: decode, prompts, many at once. kept: what KV that is kept is worth. spec: drafts."
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
        Path | None, typer.Option("--text", help="With spec and a draft model: a text to go on from and to agree on.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="With spec: draw speed-up against acceptance to this file (.png, .svg)."),
    ] = None,
    connect_timeout: Timeout = 10.0,
    trace: Tracing = None,
    verbose: Verbose = False,
) -> None:
    """Measure speed, and its causes, beside plain mlx-lm on the same work; the last line is one JSON document."""
    counts = _counts(streams)
    from splitinfer.bench.blas import prefer_openblas

    prefer_openblas()  # starts anew, so before anything else
    _set_up(verbose)
    if mode is Mode.KEPT:
        from splitinfer.bench.kept import KeptOrder, measure_kept

        kept = KeptOrder(layout, model, as_json, trials, prompt_tokens, token_budget, seed)
        _finish(lambda: measure_kept(kept), verbose)
    if mode is Mode.SPEC:
        from splitinfer.bench.spec import SpecOrder, measure_spec

        spec = SpecOrder(
            layout, model, as_json, trials, decode_tokens, seed, link_preset, baseline, connect_timeout, draft,
            _shares(acceptance), text=text, plot=plot,
        )  # fmt: skip
        _finish(lambda: measure_spec(spec), verbose)
    from splitinfer.bench.run import Order
    from splitinfer.bench.run import bench as measure

    order = Order(
        layout, model, as_json, trials, prompt_tokens, decode_tokens, token_budget, baseline, whole, seed, link_preset,
        connect_timeout, trace, counts, stream_prompt_tokens, stream_tokens, peers,
    )  # fmt: skip
    _finish(lambda: measure(order), verbose)


app.add_typer(cache_app, name="cache")


@app.command()
def version() -> None:
    """Print the versions that both sides of a pipeline must share."""
    from splitinfer.engine.versions import own_versions

    v = own_versions()
    typer.echo(f"splitinfer {v.splitinfer}, protocol {v.protocol}, mlx {v.mlx}, mlx-lm {v.mlx_lm}")


def main() -> NoReturn:
    """The entry point of `splitinfer` and `python -m splitinfer`."""
    sys.setswitchinterval(_SWITCH)
    app()
    sys.exit(0)


def _params(
    max_tokens: int,
    temp: float,
    top_p: float,
    top_k: int,
    min_p: float,
    penalty: float,
    seed: int | None,
    stop: list[str] | None,
    logprobs: int | None,
) -> SamplingParams:
    try:
        return SamplingParams(
            max_tokens=max_tokens, temperature=temp, top_p=top_p, top_k=top_k, min_p=min_p,
            repetition_penalty=penalty, seed=seed, stop=tuple(stop or ()), logprobs=logprobs,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _bytes(gigabytes: float) -> int:
    return int(min(gigabytes, _MOST_GB) * 1e9)


def _disk(kv_dir: str | None, gigabytes: float) -> "Disk | None":
    """Where KV is kept on disk; ``None``: nowhere."""
    from splitinfer.kvstore.store import Disk

    if kv_dir == "none":
        return None
    folder = default_folder() if kv_dir is None else Path(kv_dir).expanduser().absolute()
    return Disk(folder, _bytes(gigabytes))


def _start_workers(layout: str, disk: "Disk | None") -> None:
    """Let local workers come up while this process does; what is wrong with the layout is said later."""
    from splitinfer.config import find_layout
    from splitinfer.engine.local import start_early

    with contextlib.suppress(SplitinferError, OSError):
        start_early(find_layout(layout), disk)


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


def _prompt_text(prompt: str | None, chat: bool) -> str | None:
    """The prompt to answer; ``None`` opens the REPL."""
    if prompt is not None:
        if chat:
            raise ConfigError("--prompt answers and ends, --chat opens the REPL; give one of them")
        return prompt
    if chat or sys.stdin.isatty():
        return None
    text = sys.stdin.read()
    if not text.strip():
        raise ConfigError("there is no prompt: give --prompt TEXT, text on standard input, or --chat")
    return text


def _set_up(verbose: bool, *, info: bool = False) -> None:
    level = logging.DEBUG if verbose else logging.INFO if info else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[_Lines(among_answers=not info)]
    )
    for noisy in ("httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # SIGTERM takes the way of Ctrl-C, so that everything is closed on both; `open_llm` lets answers end first.
    signal.signal(signal.SIGTERM, _terminated)


class _Lines(logging.Handler):
    """The log on standard error: whatever that is at the moment, because a live display takes its place.

    ``among_answers``: standard output is an answer; on a terminal, a line of the log begins below its last words.
    """

    def __init__(self, *, among_answers: bool) -> None:
        super().__init__()
        self._before = "\n" if among_answers and sys.stdout.isatty() and sys.stderr.isatty() else ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self._before}{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it any more
            self.handleError(record)


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


def _finish(run: Callable[[], int], verbose: bool) -> NoReturn:
    """Run a command to its exit code, with one sentence for whatever went wrong."""
    try:
        code = run()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BrokenPipeError:  # whoever read standard output has seen enough
        code = 0
    except SplitinferError as error:
        code = _say(error, verbose)
    _exit(code)


def _say(error: Exception, verbose: bool) -> int:
    if verbose:
        logging.getLogger(__name__).error("here is where it happened", exc_info=error)
    typer.echo(f"splitinfer: {error}", err=True)
    return 1


def _exit(code: int) -> NoReturn:
    """End now. Threads that are inside a long computation cannot be waited for, and hold nothing to save."""
    from splitinfer.engine.local import end_early

    end_early()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
