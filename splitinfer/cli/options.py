"""Options that several commands share, each written once.

``option`` makes an option of the command line from a field that ``Settings`` declares (``splitinfer.settings``,
``core.serving_options``). A command that runs a pipeline takes ``PipelineOptions`` or ``ChatOptions`` first;
``with_options`` gives it an option for each of their fields and for each declared one.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo

from splitinfer.common.endpoint import WORKER_PORT
from splitinfer.core.sampling_defaults import ANSWER_TOKENS, DEMO_TOKENS, RECOMMENDABLE, SamplingChoice
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import SERVING, Declared, declared
from splitinfer.kvstore.files import DEFAULT_CAP, default_folder
from splitinfer.placement.asked import Aim
from splitinfer.places import folder_named
from splitinfer.settings import Settings

if TYPE_CHECKING:
    from splitinfer.kvstore.store import Disk
    from splitinfer.weights.models import ModelStore

WORKERS_FORM = r"[NAME=]ADDRESS\[#KEY]"
"""The form of a worker's name, escaped for help texts: rich would take its end for markup."""

_DECLARED = declared(Settings)
_MOST_GB = 1e9  # stands for "inf"
_CHOICE: Any = StrEnum  # typer shows its values; mypy would take a call of StrEnum for a declaration
_FIRST = ("hosts", "model", "layout", "workers", "prompt", "host", "port", "max_tokens")
"""The options that matter most, in the first panel of a command's help."""
_MORE = "More"
_cut = partial(typer.Option, rich_help_panel="Cut: which machine gets which layers (if you give no layout)")
_sampling = partial(typer.Option, rich_help_panel="Sampling: defaults come from the model's generation_config.json")


def finite(value: float | None) -> float | None:
    """Check that an option is a finite number, as its callback: "nan" passes every bound, and "inf" most of them."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"it must be a finite number, not {value}")
    return value


def _gigabytes_or_all(value: float | None) -> float | None:
    """Check an option for memory, as its callback: a finite number, or "inf" for all memory."""
    return value if value == math.inf else finite(value)


def option(name: str) -> Any:
    """Return the command line's option for a field of ``Settings``."""
    each = _DECLARED[name]
    said, flag = each.option, each.option.flag or f"--{name.replace('_', '-')}"
    is_scaled, is_number = said.per != 1, each.kind in (int, float)
    return typer.Option(
        f"{flag}/--no-{flag[2:]}" if each.kind is bool and each.may_be_none else flag,
        help=said.help,
        show_default=is_number,  # the help texts of others name their defaults
        rich_help_panel=said.panel or None,
        min=said.least,
        max=said.most,
        callback=_gigabytes_or_all if is_scaled else finite if is_number else None,
    )


def _parameter(each: Declared) -> inspect.Parameter:
    """Return a command's parameter for a declared option."""
    said, kind, default = each.option, cast(Any, each.kind), each.default
    if said.choices:
        kind = _CHOICE(each.name, [(one, one) for one in said.choices])
    elif said.per != 1:
        kind, default = float, None if default is None else default / said.per
    annotation = Annotated[kind | None if each.may_be_none else kind, option(each.name)]  # type: ignore[valid-type]
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


UseAllOption = Annotated[bool, _cut("--use-all", help="Use every machine, even if fewer would be faster.")]
MeasureOption = Annotated[bool, _cut("--measure", help="Ignore saved measurements and measure again.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model: OWNER/MODEL at the hub, a folder or 'demo'. Default: the layout's.",
    ),
]
Timeout = Annotated[float, option("connect_timeout")]
ModelsDir = Annotated[
    str | None,
    typer.Option(
        "--models-dir",
        help="Folder for weights that are copied from other machines; one in your data folder if not given, 'none' "
        "for no copies.",
    ),
]
StoreDir = Annotated[
    str | None,
    typer.Option("--models-dir", help="Folder of the copied weights; one in your data folder if not given."),
]
ModelsSize = Annotated[
    float | None,
    typer.Option(
        "--models-gb",
        min=0,
        callback=finite,
        help="GB that folder may hold. Default: all free GB of its disk but 5.",
    ),
]
# Commands take it because ``running.finished`` reads it.
Verbose = Annotated[bool, typer.Option("--verbose", help="Log more, and show an error's traceback.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of a worker."""

    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on: 127.0.0.1, only this machine; 0.0.0.0, all networks."),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = WORKER_PORT
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model's folder on this machine, if it is not where the coordinator has it."),
    ] = None
    name: Annotated[str | None, typer.Option("--name", help="This worker's name; the machine's if not given.")] = None
    kv_dir: Annotated[str | None, option("kv_dir")] = None
    kv_disk_gb: Annotated[float, option("kv_dir_bytes")] = DEFAULT_CAP / 1e9
    models_dir: ModelsDir = None
    models_gb: ModelsSize = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="No keys: anyone who can reach the port can use this worker and read its traffic."
        ),
    ] = False
    announce: Annotated[
        bool | None,
        typer.Option(
            "--announce/--no-announce",
            help="Let `splitinfer discover` find this worker by multicast DNS. Default: yes, if other machines can "
            "reach it and it has a key.",
        ),
    ] = None
    verbose: Verbose = False

    @property
    def disk(self) -> "Disk | None":
        """The KV store on disk, or None to store none."""
        return settings_of({"kv_dir": self.kv_dir, "kv_dir_bytes": self.kv_disk_gb}).disk

    @property
    def store(self) -> "ModelStore | None":
        """The store of copied weights, or None to copy none."""
        return store_of(self.models_dir, self.models_gb)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options of every command that runs a pipeline."""

    layout: Annotated[
        str | None,
        typer.Option("--layout", help="A layout file, or the name of one (see layouts/README.md)."),
    ] = None
    model: ModelOption = None
    workers: Annotated[
        str | None,
        _cut(
            "--workers",
            help=f"With --model, in place of a layout: the workers that may get layers, {WORKERS_FORM} separated by "
            "commas. They are measured, and the best cut is chosen.",
        ),
    ] = None
    auto: Annotated[
        bool,
        _cut(
            "--auto",
            help="In place of --workers: the paired workers that announce themselves now (`splitinfer discover`).",
        ),
    ] = False
    aim: Annotated[
        Aim,
        _cut("--for", metavar="GOAL", help="What to optimise the cut for: chat, throughput or context."),
    ] = Aim.CHAT
    use_all: UseAllOption = False
    measure: MeasureOption = False
    verbose: Verbose = False
    settings: Settings = field(default_factory=lambda: settings_of({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(PipelineOptions):
    """The options of every command that answers in the terminal."""

    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this and end.")] = None
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            show_default=False,
            help=f"Token limit of an answer. Default: {ANSWER_TOKENS:,}, or {DEMO_TOKENS} with the demo.",
        ),
    ] = ANSWER_TOKENS
    temperature: Annotated[
        float | None, _sampling("--temp", help="Temperature; 0 always takes the likeliest token.")
    ] = None
    top_p: Annotated[
        float | None, _sampling("--top-p", help="Sample from the likeliest tokens that hold this probability.")
    ] = None
    top_k: Annotated[int | None, _sampling("--top-k", help="Sample from the k likeliest tokens; 0 is off.")] = None
    min_p: Annotated[
        float | None, _sampling("--min-p", help="Leave out tokens less likely than this share of the likeliest.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", help="Over 1 discourages the last 20 tokens.")
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")] = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the answer before this text; may be repeated.")
    ] = None
    chat: Annotated[bool, typer.Option("--chat", help="Open the REPL, even without a terminal.")] = False
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue the prompt as it is, without the chat template and the model's sampling defaults."
        ),
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False
    status: Annotated[bool, typer.Option("--status", help="Show speed and load of the stages, live.")] = False
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", help="Hold the answer to the JSON schema in this file.", metavar="FILE"),
    ] = None
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="With --json: log probabilities of the n likeliest.")
    ] = None
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve",
            min=0,
            max=65535,
            help="Serve HTTP clients of this machine on this port: beside the REPL, or alone where there is no "
            "terminal.",
        ),
    ] = None


def with_options(command: Callable[..., int | None], without: Collection[str] = ()) -> Callable[..., int | None]:
    """Return ``command(options, ...)`` as a function with an option for each field of its first parameter's class,
    except those named in ``without``. If the class has ``settings``, each declared one gets an option, too, and help
    shows all in panels."""
    first, *own = inspect.signature(command).parameters.values()
    made: Any = first.annotation
    hints = get_type_hints(made, include_extras=True)
    plain = [
        each.replace(annotation=hints[each.name])
        for each in inspect.signature(made).parameters.values()
        if each.name not in ("settings", *without)
    ]
    settings = [_parameter(each) for each in sorted(_DECLARED.values(), key=lambda each: each.option.panel == SERVING)]
    settings = settings if "settings" in hints else []

    def run(**given: Any) -> int | None:
        found = {each.name: given.pop(each.name) for each in settings}
        fields = {each.name: given.pop(each.name) for each in plain}
        return command(made(**fields, **({"settings": settings_of(found)} if settings else {})), **given)

    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    parameters = _by_panel([*own, *plain, *settings]) if settings else [*plain, *own]
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _by_panel(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return a command's parameters in the order of its help: the most important, the panels, and the rest."""

    def rank(each: inspect.Parameter) -> tuple[int, int]:
        if each.name in _FIRST:
            return 0, _FIRST.index(each.name)
        return 2 if _option_of(each).rich_help_panel == _MORE else 1, 0

    return sorted(map(_in_panel, parameters), key=rank)


def _in_panel(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter with a copy of its option in its panel: several commands share the option itself."""
    info = copy(_option_of(parameter))
    if isinstance(info, ArgumentInfo) or parameter.name in _FIRST:
        info.rich_help_panel = None
    else:
        info.rich_help_panel = info.rich_help_panel or _MORE
    kind = get_args(parameter.annotation)[0]
    return parameter.replace(annotation=Annotated[kind, info])


def _option_of(parameter: inspect.Parameter) -> Any:
    return parameter.annotation.__metadata__[0]


def sampling(options: ChatOptions) -> SamplingChoice:
    """Return the sampling that the options ask for. It is greedy if the model recommends no temperature either."""
    if options.logprobs is not None and not options.as_json:
        raise typer.BadParameter("--logprobs is printed with --json only; add --json")
    given = {name: value for name in RECOMMENDABLE if (value := getattr(options, name)) is not None}
    try:
        base = SamplingParams(
            max_tokens=options.max_tokens,
            seed=options.seed,
            stop=tuple(options.stop or ()),
            logprobs=options.logprobs,
        )
        return SamplingChoice(given, base)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def settings_of(declared: Mapping[str, Any]) -> Settings:
    """Return the settings for the declared options, given by their fields' names."""
    given = {name: _in_own_unit(_DECLARED[name], value) for name, value in declared.items()}
    given["kv_dir"] = given["kv_dir"] if given.get("kv_dir") is not None else default_folder()
    try:
        return Settings(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _in_own_unit(each: Declared, value: Any) -> Any:
    """Return an option's value in the unit of the field."""
    return value if value is None or each.option.per == 1 else int(min(value, _MOST_GB) * each.option.per)


def check_named(options: PipelineOptions) -> None:
    """Refuse options that name no stages, or name them twice, or would have no effect."""
    by = {
        "--layout": options.layout is not None, "--workers": options.workers is not None, "--auto": options.auto
    }  # fmt: skip
    named = [name for name, is_given in by.items() if is_given]
    if len(named) > 1:
        raise typer.BadParameter(f"{named[0]} names the workers, and so does {named[1]}; give one of them")
    if named in (["--workers"], ["--auto"]) and options.model is None:
        raise typer.BadParameter(f"{named[0]} needs a model to cut: name it with --model")
    if not named and options.model is None:
        raise typer.BadParameter(
            "a model is needed: --model OWNER/MODEL, a folder or 'demo', or --layout FILE, which names one"
        )
    given = {"--for": options.aim is not Aim.CHAT, "--use-all": options.use_all, "--measure": options.measure}
    unused = [name for name, is_given in given.items() if is_given]
    if unused and not (options.workers is not None or options.auto):
        has_one = "--layout has one" if options.layout is not None else "one machine needs none"
        raise typer.BadParameter(f"{unused[0]} is for choosing a cut, and {has_one}; give --workers or --auto instead")


def store_of(folder: str | None, gigabytes: float | None) -> "ModelStore | None":
    """Return the store of copied weights that ``--models-dir`` and ``--models-gb`` describe."""
    from splitinfer.weights.models import ModelStore, default_folder

    path = default_folder() if folder is None else folder_named(folder, "--models-dir")
    return None if path is None else ModelStore(path, None if gigabytes is None else int(gigabytes * 1e9))


def words_of(options: WorkerOptions, always: Collection[str] = ()) -> list[str]:
    """Return a worker's options as words of a command line, without defaults, except for the fields in ``always``."""
    words, hints = list[str](), get_type_hints(WorkerOptions, include_extras=True)
    for each in fields(options):
        value = getattr(options, each.name)
        if value is None or (value == each.default and each.name not in always):
            continue
        flag, _, opposite = hints[each.name].__metadata__[0].default.partition("/")  # typer's place for the name
        words += [flag if value else opposite] if isinstance(value, bool) else [flag, str(value)]
    return words
