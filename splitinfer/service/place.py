"""Where a service is installed, a user's home on a kind of system."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """platform: as ``sys.platform`` has it. user: the user's id. sleep: waits for that many seconds."""

    platform: str
    home: Path
    user: int
    environment: Mapping[str, str] = field(default_factory=dict)
    sleep: Callable[[float], None] = time.sleep


def here() -> Place:
    """This process's user, on this machine."""
    return Place(sys.platform, Path.home(), os.geteuid(), dict(os.environ))
