"""Where a machine keeps KV if nobody says where: in the user's folder for caches, as the platform has it."""

import os
import sys
from pathlib import Path

DEFAULT_CAP = 20 * 10**9  # bytes


def default_folder() -> Path:
    """splitinfer/kv in $XDG_CACHE_HOME if that is set, else in ~/Library/Caches on macOS and ~/.cache elsewhere."""
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / usual) / "splitinfer" / "kv"
