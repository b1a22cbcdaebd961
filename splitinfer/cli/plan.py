"""`splitinfer plan`: decides from measurements which machine gets which layers."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitinfer.cli.opening import paired_workers
from splitinfer.cli.options import WORKERS_FORM, MeasureOption, ModelOption, Timeout, UseAllOption, Verbose, finite
from splitinfer.cli.running import say
from splitinfer.errors import ConfigError, PeerError
from splitinfer.placement.asked import Aim, Asked

if TYPE_CHECKING:
    from splitinfer.core.layout import Layout
    from splitinfer.machine.profile import Profiles

_GB = 1e9
_DEFAULTS = Asked()
_memory = partial(typer.Option, rich_help_panel="Memory")
_workload = partial(typer.Option, rich_help_panel="Workload")
_FOR = "What to optimise the cut for, in the table and in --out: chat, throughput or context."


def plan(
    model: ModelOption = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            help=f"The workers that may get layers, {WORKERS_FORM} separated by commas. "
            "Default: the paired ones that run.",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", help="A layout whose stages may get layers, in place of --workers; its cut is ignored."
        ),
    ] = None,
    aim: Annotated[Aim, typer.Option("--for", metavar="GOAL", help=_FOR)] = Aim.CHAT,
    out: Annotated[Path | None, typer.Option("--out", help="Write the layout to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --out.")] = False,
    uses_all: UseAllOption = False,
    draft: Annotated[
        str | None, typer.Option("--draft", help="The draft model, or 'none'. Default: the layout's.")
    ] = None,
    acceptance: Annotated[
        float,
        _workload("--acceptance", min=0, max=1, help="Share of drafts that are accepted."),
    ] = 0.7,
    streams: Annotated[int, _workload("--streams", min=1, help="Streams at once, for throughput.")] = _DEFAULTS.streams,
    prompt_tokens: Annotated[
        int, _workload("--prompt-tokens", min=1, help="Tokens of a chat's prompt.")
    ] = _DEFAULTS.prompt,
    answer_tokens: Annotated[
        int, _workload("--answer-tokens", min=2, help="Tokens of a chat's answer.")
    ] = _DEFAULTS.answer,
    token_budget: Annotated[
        int | None,
        _workload("--token-budget", min=1, help="Most tokens in a step; default: as coord."),
    ] = None,
    context: Annotated[
        int, _memory("--context", min=1, help="The context that must fit, in tokens.")
    ] = _DEFAULTS.context,
    spare_gb: Annotated[
        float,
        _memory("--spare-gb", min=0, callback=finite, help="GB to leave free on each machine."),
    ] = 0.0,
    kv_share: Annotated[
        float,
        _memory(
            "--kv-share",
            min=0.01,
            max=1,
            help="Share of what weights leave free that KV may take; coord takes half, or --kv-gb.",
        ),
    ] = _DEFAULTS.kv_share,
    measure: MeasureOption = False,
    connect_timeout: Timeout = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON in place of the tables.")] = False,
    verbose: Verbose = False,
) -> int:
    """Do a model fit here, how fast is it, and what do other machines bring? Measures them and finds the best cut."""
    from splitinfer.cli.plan_tables import show
    from splitinfer.placement.plan import plan as make_plan

    base = _base(layout, workers)
    if out is not None and out.exists() and not force:
        raise ConfigError(f"{out} exists; name another file, or replace it with --force")
    found = _measured(model, workers, base, draft, connect_timeout, again=measure)
    asked = Asked(
        context=min(context, found.model.context_length),
        streams=streams,
        prompt=prompt_tokens,
        answer=answer_tokens,
        acceptance=None if found.model.draft is None else acceptance,
        token_budget=token_budget,
        uses_all=uses_all,
        spare_bytes=round(spare_gb * _GB),
        kv_share=kv_share,
    )
    return show(make_plan(found, asked), aim, base, out, as_json=as_json)


def _base(layout: str | None, workers: str | None) -> "Layout | None":
    """Return the layout that has what a plan does not choose."""
    if layout is None:
        return None
    if workers is not None:
        raise typer.BadParameter("--layout names the machines, and so does --workers; give one of them")
    from splitinfer.config import find_layout

    return find_layout(layout)


def _measured(
    model: str | None, workers: str | None, base: "Layout | None", draft: str | None, timeout: float, *, again: bool
) -> "Profiles":
    """Return the profiles of this machine and of the workers that are named, measured now or remembered by each."""
    from splitinfer.console import measuring
    from splitinfer.llm import Settings
    from splitinfer.llm.automatic import found_workers, measured_profiles, named
    from splitinfer.models.folder.hub import named_anywhere

    name = named_anywhere(model) if model else (None if base is None else base.model)
    if name is None:
        raise ConfigError("a model is needed: --model OWNER/MODEL, a folder or 'demo'; or --layout FILE")
    is_named = workers is not None or base is not None
    given = named(workers or "") if is_named else paired_workers()
    specs = found_workers(given) if base is None else base.stages[1:]
    settings = Settings(
        draft=draft or (None if base is None else base.draft),
        kv_format=None if base is None else base.kv_format,
        connect_timeout=timeout,
    )
    dtype = "auto" if base is None else base.dtype
    with measuring() as notice:
        try:
            return measured_profiles(name, specs, settings, notice, dtype, again=again)
        except PeerError as error:
            if is_named:
                raise
            say(f"{error}. The plan is for this machine alone.")
            return measured_profiles(name, (), settings, notice, dtype, again=again)
