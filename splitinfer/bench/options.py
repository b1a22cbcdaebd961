"""The options of ``splitinfer bench``, which all modes share, and what follows from them before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitinfer.config import find_layout
from splitinfer.core.layout import Layout
from splitinfer.errors import ConfigError
from splitinfer.llm import Settings
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import open_model


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options; the help of ``splitinfer bench`` says which mode reads which."""

    layout: str = ""
    model: str | None = None
    trials: int = 5
    prompt_tokens: int = 2048
    decode_tokens: int = 64
    streams: tuple[int, ...] = (16,)
    minutes: float = 15.0
    report: Path | None = None
    ssh: bool = False

    @property
    def found_layout(self) -> Layout:
        """The layout by that name."""
        return find_layout(self.layout)

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's checkpoint, as far as it is on this machine."""
        return open_model(self.model or self.found_layout.model or "demo")

    def settings(self, context: int, **more: Any) -> Settings:
        """The engine's settings: the loss of a worker ends the measurement, unless ``more`` says otherwise."""
        fixed: dict[str, Any] = {"context": context, "prefix_cache": True, "rejoin_timeout": 0.0}
        return Settings(**{**fixed, **more})

    def check_context(self, needed: int) -> None:
        """Refuse tasks that exceed the model's context, before anything is loaded.

        Raises:
            ConfigError: ``needed`` tokens do not fit.
        """
        length = self.checkpoint.context_length
        if needed > length:
            raise ConfigError(
                f"the tasks need {needed:,} tokens, but the model's context is {length:,}; give fewer with "
                "--prompt-tokens or --decode-tokens"
            )
