"""The options of ``splitinfer bench``, which all modes share, and what follows from them before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitinfer.config import find_layout
from splitinfer.core.layout import Layout
from splitinfer.errors import ConfigError
from splitinfer.llm import NO_DRAFT, Settings
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import open_model
from transports import AddressError
from transports.emulation import emulator


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options; the help of ``splitinfer bench`` says which mode reads which.

    streams: ``None``: what is usual for the mode.
    draft: ``replay``, or as in a layout; ``None``: the layout's.
    """

    layout: str = ""
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
    streams: tuple[int, ...] | None = None
    come_and_go: float = 0.0
    stream_prompt_tokens: int = 128
    stream_tokens: int = 64
    peers: bool = False
    ssh: bool = False
    draft: str | None = None
    acceptances: tuple[float, ...] = (0.0, 0.6, 0.8, 0.9)
    text: Path | None = None
    texts: int = 12
    plot: Path | None = None
    connect_timeout: float = 10.0
    trace: Path | None = None
    minutes: float = 15.0
    report: Path | None = None

    @property
    def found_layout(self) -> Layout:
        """The layout by that name."""
        return find_layout(self.layout)

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's checkpoint, as far as it is on this machine."""
        return open_model(self.model or self.found_layout.model or "demo")

    def settings(self, context: int, **more: Any) -> Settings:
        """The engine's settings. Nothing is found in a cache, nobody drafts, and the loss of a worker ends the
        measurement, unless ``more`` says otherwise."""
        usual: dict[str, Any] = {"prefix_cache": False, "draft": NO_DRAFT}
        fixed = {"context": context, "connect_timeout": self.connect_timeout, "rejoin_timeout": 0.0}
        return Settings(**{**usual, **fixed, **more})

    def link(self) -> Any:
        """The link to emulate between the coordinator and workers, and between workers: a profile (`tests/emulation`);
        ``None``: none.

        Raises:
            ConfigError: the layout has no links, there is no such preset, or no emulator.
        """
        if self.link_preset is None:
            return None
        if self.found_layout.num_stages == 1:
            raise ConfigError(
                f"--link-preset emulates the links between stages; layout {self.layout} has 1 stage, so none"
            )
        try:
            return emulated_links().preset(self.link_preset)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def emulated_links() -> Any:
    """The emulators of links (`tests/emulation/links`).

    Raises:
        ConfigError: this is not a checkout.
    """
    try:
        return emulator("links")
    except AddressError as error:
        raise ConfigError(str(error)) from error
