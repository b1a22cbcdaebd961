"""The options of ``splitinfer bench --mode speed``, and what follows from them before anything is loaded.

That is the tasks that all systems get, the engine's settings for them, and the link to emulate. What cannot be measured
is refused here.
"""

from dataclasses import dataclass
from pathlib import Path

from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.workload import Workload
from splitinfer.config import find_layout
from splitinfer.core.serving_options import MAX_RUNNING
from splitinfer.errors import ConfigError
from splitinfer.llm import Settings
from splitinfer.models.hub import open_model
from transports.emulated import LinkProfile, preset


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """The command line's options."""

    layout: str
    model: str | None = None
    as_json: bool = False
    trials: int = 5
    prompt_tokens: int = 2048
    decode_tokens: int = 64
    token_budget: int | None = None
    baseline: bool = True
    whole: bool = False
    seed: int = 1
    link_preset: str | None = None
    connect_timeout: float = 10.0
    trace: Path | None = None
    streams: tuple[int, ...] = (8,)
    stream_prompt_tokens: int = 128
    stream_tokens: int = 64
    peers: bool = False


def settings_of(options: SpeedOptions) -> Settings:
    """The engine's settings. The loss of a worker ends the measurement, because figures with a pause mean nothing."""
    num_stages = find_layout(options.layout).num_stages
    return Settings(
        token_budget=options.token_budget,
        context=plan(options, 2).longest,
        max_running=max([MAX_RUNNING, *(n * num_stages for n in options.streams)]),
        connect_timeout=options.connect_timeout,
        rejoin_timeout=0.0,
        trace=options.trace,
    )


def plan(options: SpeedOptions, vocab_size: int) -> Workload:
    """The tasks of all trials."""
    return Workload(
        options.trials,
        options.prompt_tokens,
        options.decode_tokens,
        vocab_size,
        options.seed,
        options.streams,
        options.stream_prompt_tokens,
        options.stream_tokens,
    )


def check_length(options: SpeedOptions) -> None:
    """Refuse tasks that exceed the model's context, before anything is loaded.

    Raises:
        ConfigError: one of them does.
    """
    model = options.model or find_layout(options.layout).model
    if model is not None:
        names = "--prompt-tokens, --decode-tokens or --stream-tokens"
        check_context(open_model(model), plan(options, 2).longest, names)


def link_of(options: SpeedOptions) -> LinkProfile:
    """The link to emulate, between the coordinator and workers and, by the addresses sent to workers, between these.

    Raises:
        ConfigError: the layout has no links, or there is no such preset.
    """
    if find_layout(options.layout).num_stages == 1:
        raise ConfigError(
            f"--link-preset emulates the links between stages; layout {options.layout} has 1 stage, so none"
        )
    try:
        return preset(str(options.link_preset))
    except ValueError as error:
        raise ConfigError(str(error)) from error
