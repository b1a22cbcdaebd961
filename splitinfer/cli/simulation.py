"""`splitinfer simulate`: runs the scheduler in virtual time, without a pipeline."""

from pathlib import Path
from typing import Annotated

import typer

from splitinfer.cli.options import ItlSlo, Lengths, MaxRunning, PrefillShare, Scale, Verbose
from splitinfer.cli.running import finish, set_up
from splitinfer.core.scheduler.policy import PolicyName
from splitinfer.core.serving_options import ServingOptions

_CONTEXT = 8192


def simulate(
    machine: Annotated[
        Path, typer.Option("--machine", help="What `bench --mode serve` printed, or your own (docs/fast/serving.md).")
    ],
    lengths: Lengths = None,
    scale: Scale = 1.0,
    requests: Annotated[int, typer.Option("--requests", min=2, help="Number of requests.")] = 256,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Requests a second, as in 0.5,1,2; default: as recorded.")
    ] = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Find the highest rate at which the objectives are met.")
    ] = False,
    objective: Annotated[
        str,
        typer.Option("--objective", help="With --find-capacity: gaps between tokens, as multiples of the usual one."),
    ] = "5,25",
    policies: Annotated[
        str, typer.Option("--policies", help="Policies, separated by commas, or 'all'.")
    ] = "stall_free,prefill_first",
    budgets: Annotated[str, typer.Option("--budgets", help="Tokens in a step, as in 128,256,512.")] = "512",
    all_cuts: Annotated[bool, typer.Option("--cuts", help="Try every cut of the layers.")] = False,
    hop_ms: Annotated[
        float | None, typer.Option("--hop-ms", min=0, help="Milliseconds of a hop, instead of the machine's.")
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option("--kv-tokens", min=1, help="Tokens of KV that fit.")] = None,
    acceptance: Annotated[
        float | None, typer.Option("--acceptance", min=0, max=1, help="Draft, and accept this share of the drafts.")
    ] = None,
    itl_slo_ms: ItlSlo = None,
    prefill_share: PrefillShare = None,
    max_running: MaxRunning = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the arrivals.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Run the live scheduler in virtual time: capacity, cuts and chunks, for machines here or elsewhere."""
    set_up(verbose)
    rates = () if rate is None else _numbers(rate, "--rate")
    names = tuple(PolicyName) if policies == "all" else tuple(each.strip() for each in policies.split(","))
    unknown = next((name for name in names if name not in tuple(PolicyName)), None)
    if unknown is not None:
        raise typer.BadParameter(f"policy {unknown!r} is not one of {', '.join(PolicyName)}")
    serving_options = ServingOptions(itl_slo_ms=itl_slo_ms, prefill_share=prefill_share, max_running=max_running)

    def run() -> int:
        from splitinfer.cli.simulation_tables import run_simulation
        from splitinfer.machine.files import read_machine
        from splitinfer.sim.search import Search
        from splitinfer.sim.workload import fitted, made_up_lengths, read_lengths

        found = read_machine(machine)
        asked = Search(
            machine=found if hop_ms is None else found.with_hop(hop_ms / 1000),
            lengths=fitted(made_up_lengths() if lengths is None else read_lengths(lengths), scale, _CONTEXT),
            serving_options=serving_options,
            policies=names,
            budgets=tuple(map(int, _numbers(budgets, "--budgets"))),
            requests=requests,
            seed=seed,
            rates=rates,
            objectives=_numbers(objective, "--objective") if find_capacity else (),
            all_cuts=all_cuts,
            kv_tokens=kv_tokens,
            acceptance=acceptance,
        )
        return run_simulation(asked, as_json=as_json)

    finish(run, verbose)


def _numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers over 0, separated by commas."""
    try:
        numbers = tuple(float(each) for each in text.split(","))
        if not all(0 < number < float("inf") for number in numbers):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers over 0, separated by commas, not {text!r}") from None
    return numbers
