"""Where a service is installed: a user's home on a kind of system, and how to act there."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.service.commands import Run, run


@dataclass(frozen=True, slots=True)
class Place:
    """platform: as ``sys.platform`` has it. user: the user's id. sleep: waits for that many seconds."""

    platform: str
    home: Path
    user: int
    environment: Mapping[str, str] = field(default_factory=dict)
    run: Run = run
    sleep: Callable[[float], None] = time.sleep

    def check(self) -> None:
        """Raises ConfigError: a service cannot be installed by this user, or on this system."""
        if self.platform not in ("darwin", "linux"):
            raise ConfigError(f"services are for launchd (macOS) and systemd (Linux), not for {self.platform}")
        if self.user == 0:
            raise ConfigError(
                "a service runs as the user who installs it, with that user's keys and models, and never as root: run "
                "this without sudo"
            )


def here() -> Place:
    """This process's user, on this machine."""
    return Place(sys.platform, Path.home(), os.geteuid(), dict(os.environ))
