"""Options that several commands have, each written once.

A command that runs a pipeline declares one parameter of type ``PipelineOptions``; ``with_pipeline_options`` gives it an
option for each of its fields.
"""

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from splitinfer.core.sampling_defaults import SamplingChoice
from splitinfer.core.scheduler.policy import LEAST_SHARE, PolicyName
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import ServingOptions
from splitinfer.errors import SplitinferError
from splitinfer.kvstore.paths import DEFAULT_CAP, default_folder
from splitinfer.placement.asked import Aim

if TYPE_CHECKING:
    from splitinfer.kvstore.store import Disk
    from splitinfer.llm import Settings
    from splitinfer.store.models import ModelStore

_MOST_GB = 1e9  # stands for "inf"
_SERVING = "Serving: whether prompts or answers go first"
_SAMPLING = "Sampling: the model's generation_config.json recommends what is not given"


def store_of(folder: str | None, gigabytes: float | None) -> "ModelStore | None":
    """The store of copied weights that ``--models-dir`` and ``--models-gb`` describe."""
    from splitinfer.store.models import ModelStore
    from splitinfer.store.paths import default_folder

    if folder == "none":
        return None
    path = default_folder() if folder is None else Path(folder).expanduser()
    return ModelStore(path, None if gigabytes is None else int(gigabytes * 1e9))


def finite(value: float | None) -> float | None:
    """Refuses numbers that are not finite, as an option's callback: "nan" passes every bound, and "inf" most."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"it must be a finite number, not {value}")
    return value


def _gigabytes_or_all(value: float | None) -> float | None:
    """The same for memory, where "inf" stands for all there is."""
    return value if value == math.inf else finite(value)


LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout", help="A layout file, or the name of one (see layouts/README.md); without, --workers and --model."
    ),
]
WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers",
        help="In place of a layout: workers that may get layers, [NAME=]ADDRESS[#KEY] with commas between. They are "
        "measured, and the best cut is chosen.",
    ),
]
UseAllOption = Annotated[bool, typer.Option("--use-all", help="Give every machine layers, though fewer be better.")]
AimOption = Annotated[Aim, typer.Option("--for", help="What to optimise the cut for.")]
MeasureOption = Annotated[
    bool,
    typer.Option("--measure", help="Measure machines anew, also those that remember what they were measured to do."),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Hub id, folder or 'demo'; if not given, the layout's, or that of the last `up`."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer, at most.")]
Temp = Annotated[
    float | None,
    typer.Option("--temp", help="Temperature; 0 always takes the likeliest token.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Sample from the likeliest tokens that hold this probability.", rich_help_panel=_SAMPLING
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Sample from the k likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", help="Leave out tokens less likely than this share of the likeliest.", rich_help_panel=_SAMPLING
    ),
]
Penalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Over 1 discourages the last 20 tokens.", rich_help_panel=_SAMPLING),
]
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
    typer.Option(
        "--kv-gb", min=0, callback=_gigabytes_or_all, help="GB for KV on each stage; half of what is free if not given."
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        help="Tokens of a prompt and its answer together; if not given, 8,192 or the model's own, "
        "and for a server what memory allows.",
    ),
]
DraftName = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="What drafts tokens: a small model of the same tokenizer, 'ngram', both as MODEL+ngram, or 'none'.",
    ),
]
CodecName = Annotated[
    str | None,
    typer.Option(
        "--codec",
        help="Codec of prompts' hidden states on every link: none, fp16, fp8, int8, auto; the layout's if not given.",
    ),
]
Float32Head = Annotated[
    bool | None,
    typer.Option(
        "--float32-head/--no-float32-head",
        help="Compute the norm and the head in float32; as the layout says if not given.",
    ),
]
KVFormatName = Annotated[
    str | None,
    typer.Option(
        "--kv-format",
        help="How keys and values are stored: exact, k8v8 (8 bits), k8v4 (values in 4); the layout's if not given.",
    ),
]
ModelsDir = Annotated[
    str | None,
    typer.Option(
        "--models-dir",
        help="Folder for weights that are copied from other machines; one in your data folder if not given, 'none' "
        "for no copies.",
    ),
]
ModelsSize = Annotated[
    float | None,
    typer.Option(
        "--models-gb", min=0, callback=finite, help="GB that folder may hold; if not given, what its disk has free."
    ),
]
Accelerator = Annotated[
    Path | None,
    typer.Option("--accelerator", help="Compute in the times of this machine file: an emulated accelerator."),
]
Timeout = Annotated[
    float, typer.Option("--connect-timeout", min=0.1, callback=finite, help="Seconds to reach a worker.")
]
Rejoin = Annotated[
    float,
    typer.Option(
        "--rejoin-timeout",
        min=0,
        callback=finite,
        help="Seconds to wait for a lost worker to come back; 0 gives up at once.",
    ),
]
Tracing = Annotated[
    Path | None, typer.Option("--trace", help="Write a timeline of every step to this file, for ui.perfetto.dev.")
]
KVDir = Annotated[
    str | None,
    typer.Option(
        "--kv-dir",
        help="Folder where KV is stored for later runs; in your cache folder if not given; 'none': in memory only.",
    ),
]
KVDirSize = Annotated[
    float,
    typer.Option(
        "--kv-disk-gb",
        min=0,
        callback=_gigabytes_or_all,
        help="GB that folder may hold; the least recently used goes first.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log more, and show an error's traceback.")]

Policy = Annotated[
    PolicyName | None,
    typer.Option(
        "--policy",
        rich_help_panel=_SERVING,
        help="stall_free: answers never wait for prompts. prefill_first: prompts go first. watermark: prompts until "
        "memory is full, then answers. decode_first: no request is admitted until all are answered.",
    ),
]
ItlSlo = Annotated[
    float | None,
    typer.Option(
        "--itl-slo-ms",
        min=0.001,
        rich_help_panel=_SERVING,
        help="Milliseconds between two tokens of an answer, at most; prompts are read in chunks that allow it.",
    ),
]
PrefillShare = Annotated[
    float | None,
    typer.Option(
        "--prefill-share",
        min=LEAST_SHARE,
        max=1,
        rich_help_panel=_SERVING,
        help="1 reads prompts soonest, less keeps running answers steadier.",
    ),
]
MaxRunning = Annotated[
    int | None,
    typer.Option("--max-running", min=1, rich_help_panel=_SERVING, help="Requests that share the stages; 32."),
]
MaxPartial = Annotated[
    int | None,
    typer.Option(
        "--max-partial-prefills",
        min=1,
        rich_help_panel=_SERVING,
        help="Prompts read side by side; with more than 1, short ones pass long ones.",
    ),
]
MaxGap = Annotated[
    float | None,
    typer.Option(
        "--max-decode-gap-ms",
        min=0.001,
        rich_help_panel=_SERVING,
        help="Milliseconds for which prefill_first and watermark may keep answers waiting.",
    ),
]
KVHigh = Annotated[
    float | None,
    typer.Option("--kv-high", rich_help_panel=_SERVING, help="Share of KV memory at which watermark turns to answers."),
]
KVLow = Annotated[
    float | None,
    typer.Option("--kv-low", rich_help_panel=_SERVING, help="Share at which it turns back to prompts."),
]
MinDwell = Annotated[
    int | None,
    typer.Option(
        "--min-dwell",
        rich_help_panel=_SERVING,
        help="Steps that watermark stays with prompts or with answers, at least.",
    ),
]


Lengths = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        help="A CSV of requests: num_prompt_tokens, num_output_tokens, optionally arrived_at; like chats if not given.",
    ),
]
Scale = Annotated[
    float,
    typer.Option(
        "--scale",
        min=1e-4,
        callback=finite,
        help="Make those requests shorter, for a smaller model; answers to 100 tokens on average at least.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options of every command that runs a pipeline."""

    layout: LayoutOption = None
    model: ModelOption = None
    workers: WorkersOption = None
    aim: AimOption = Aim.CHAT
    use_all: UseAllOption = False
    measure: MeasureOption = False
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: Penalty = None
    seed: Seed = None
    context: Context = None
    draft: DraftName = None
    kv_format: KVFormatName = None
    codec: CodecName = None
    float32_head: Float32Head = None
    kv_gb: KVMemory = None
    kv_dir: KVDir = None
    kv_disk_gb: KVDirSize = DEFAULT_CAP / 1e9
    connect_timeout: Timeout = 10.0
    rejoin_timeout: Rejoin = 60.0
    trace: Tracing = None
    verbose: Verbose = False
    policy: Policy = None
    token_budget: Budget = None
    itl_slo_ms: ItlSlo = None
    prefill_share: PrefillShare = None
    max_running: MaxRunning = None
    max_partial_prefills: MaxPartial = None
    max_decode_gap_ms: MaxGap = None
    kv_high: KVHigh = None
    kv_low: KVLow = None
    min_dwell: MinDwell = None


def with_pipeline_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command(options, ...)`` as a function with an option for each field of ``PipelineOptions``."""
    hints = get_type_hints(PipelineOptions, include_extras=True)
    common = [
        each.replace(annotation=hints[each.name]) for each in inspect.signature(PipelineOptions).parameters.values()
    ]
    own = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(command).parameters.values()
        if each.annotation is not PipelineOptions
    ]

    def run(**given: Any) -> None:
        options = PipelineOptions(**{each.name: given.pop(each.name) for each in common})
        command(options, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([common[0], *own, *common[1:]])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*common, *own)}
    return run


def sampling(
    options: PipelineOptions,
    temp: float | None,
    *,
    usual_temp: float,
    max_tokens: int,
    stop: list[str] | None = None,
    logprobs: int | None = None,
) -> SamplingChoice:
    """The sampling that the options ask for; ``usual_temp`` where the model recommends no temperature either."""
    given = {
        "temperature": temp,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
    }
    try:
        base = SamplingParams(
            max_tokens=max_tokens,
            temperature=usual_temp,
            seed=options.seed,
            stop=tuple(stop or ()),
            logprobs=logprobs,
        )
        return SamplingChoice({name: value for name, value in given.items() if value is not None}, base)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def settings_of(options: PipelineOptions) -> "Settings":
    """The settings of a pipeline. Its local workers are started, so that they come up while this process does."""
    _check_named(options)
    settings = plain_settings(options)
    if options.layout is not None:
        start_workers(options.layout, disk_of(options.kv_dir, options.kv_disk_gb))
    return settings


def plain_settings(options: PipelineOptions) -> "Settings":
    """The settings of a pipeline whose stages are named elsewhere."""
    disk = disk_of(options.kv_dir, options.kv_disk_gb)
    serving_options = _serving_options(options)
    from splitinfer.llm import Settings

    return Settings(
        **serving_options.as_dict(),
        context=options.context,
        draft=options.draft,
        kv_format=options.kv_format,
        codec=options.codec,
        float32_head=options.float32_head,
        kv_bytes=None if options.kv_gb is None else _gigabytes(options.kv_gb),
        kv_dir=None if disk is None else disk.path,
        kv_dir_bytes=_gigabytes(options.kv_disk_gb),
        connect_timeout=options.connect_timeout,
        rejoin_timeout=options.rejoin_timeout,
        trace=options.trace,
    )


def _check_named(options: PipelineOptions) -> None:
    """Refuse options that name no stages, or name them twice."""
    if options.layout is None and options.workers is None:
        raise typer.BadParameter("name a layout with --layout, or workers that may get layers with --workers")
    if options.layout is not None and options.workers is not None:
        raise typer.BadParameter("--layout names the workers, and so does --workers; give one of them")
    if options.workers is not None and options.model is None:
        raise typer.BadParameter("--workers needs a model to cut: name it with --model")


def _serving_options(options: PipelineOptions) -> ServingOptions:
    try:
        return ServingOptions(**{each.name: getattr(options, each.name) for each in fields(ServingOptions)})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _gigabytes(count: float) -> int:
    return int(min(count, _MOST_GB) * 1e9)


def disk_of(kv_dir: str | None, gigabytes: float) -> "Disk | None":
    """The KV store on disk that the options name; ``None`` if there is to be none."""
    from splitinfer.kvstore.store import Disk

    if kv_dir == "none":
        return None
    folder = default_folder() if kv_dir is None else Path(kv_dir).expanduser().absolute()
    return Disk(folder, _gigabytes(gigabytes))


def start_workers(layout: str, disk: "Disk | None") -> None:
    """Start the local workers early, while this process comes up; an invalid layout is reported later."""
    from splitinfer.config import find_layout
    from splitinfer.engine.coordinator.local_workers import start_early

    with contextlib.suppress(SplitinferError, OSError):
        start_early(find_layout(layout), disk)
