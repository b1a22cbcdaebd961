"""The layout of a command that runs a pipeline: the one that is named, or one that is planned for the workers named.

Without workers, all layers are on this machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from splitinfer.cli.options import PipelineOptions

if TYPE_CHECKING:
    from splitinfer.llm import Settings
    from splitinfer.llm.automatic import Chosen


def layout_of(options: PipelineOptions, settings: "Settings") -> "str | Chosen":
    """The layout's name, or what was planned. What is planned is said on standard error, and why.

    Raises:
        SplitinferError: a machine cannot be measured, or no cut fits.
    """
    if options.layout is not None:
        return options.layout
    from splitinfer.console import errors, say
    from splitinfer.discovery.discover import paired
    from splitinfer.engine.versions import own_versions
    from splitinfer.keyring import Keyring
    from splitinfer.llm.automatic import alone, named

    assert options.model is not None
    if options.workers is not None:
        return planned(options.model, named(options.workers), settings, options)
    # Before seconds are spent on looking:
    chosen: Chosen | None = None if options.auto else alone(options.model, settings)
    workers = paired(Keyring().known(), own_versions())
    if options.auto and workers:
        chosen = planned(options.model, workers, settings, options)
        return replace(chosen, layout=chosen.layout.to_be_found())  # so that they are looked for again if they move
    if options.auto:
        errors.print("No paired worker announces itself; `splitinfer discover` shows what does.", soft_wrap=True)
    chosen = chosen or alone(options.model, settings)
    names = " and ".join(each["name"] for each in workers)
    found = f" Found and paired: {names}; --auto uses {'it' if len(workers) == 1 else 'them'}." if workers else ""
    say(chosen.text + found)
    return chosen


def planned(
    model: str, workers: Sequence[str | Mapping[str, Any]], settings: "Settings", options: PipelineOptions
) -> "Chosen":
    """Measure the machines, choose a cut, and say which, and why. Raises SplitinferError: as ``layout_of``."""
    from splitinfer.console import errors, measuring, say
    from splitinfer.llm.automatic import choose_layout

    with measuring() as notice:
        chosen = choose_layout(
            model, workers, settings, notice, aim=options.aim, again=options.measure, uses_all=options.use_all
        )
    say(chosen.text)
    if len(chosen.layout.stages) <= len(workers):
        errors.print("With --use-all every machine gets layers.")
    return chosen
