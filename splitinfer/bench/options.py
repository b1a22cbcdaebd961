"""The options of ``splitinfer bench``, and the checks before anything is loaded."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitinfer.errors import ConfigError
from splitinfer.settings import Settings

if TYPE_CHECKING:
    from splitinfer.models.folder.checkpoint import Checkpoint


def _numbers(text: str) -> str:
    """Check that an option is a comma-separated list of positive numbers, as its callback."""
    if not re.fullmatch(r" *0*[1-9]\d* *(, *0*[1-9]\d* *)*", text):
        raise typer.BadParameter(f"it takes numbers with commas between them, not {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options."""

    layout: Annotated[str, typer.Option("--layout", help="A layout file, or the name of one. Always needed.")] = ""
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model: OWNER/MODEL at the hub, a folder or 'demo'. Default: the layout's."),
    ] = None
    trials: Annotated[int, typer.Option("--trials", min=1, help="Number of trials.")] = 5
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of the long prompt.")] = 2048
    decode_tokens: Annotated[int, typer.Option("--decode-tokens", min=8, help="Tokens of each stream.")] = 64
    streams: Annotated[
        str,
        typer.Option("--streams", callback=_numbers, help="Numbers of streams at once, as in 8,16,32."),
    ] = "16"

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of streams, each once."""
        return tuple(dict.fromkeys(map(int, self.streams.split(","))))

    @property
    def checkpoint(self) -> "Checkpoint":
        """The model's checkpoint, complete or in part on this machine."""
        from splitinfer.config import find_layout
        from splitinfer.models.folder.hub import open_model

        return open_model(self.model or find_layout(self.layout).model or "demo")

    def settings(self, context: int, **more: Any) -> Settings:
        """Return the engine's settings. The loss of a worker ends the measurement, unless ``more`` says otherwise."""
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
