"""Where a machine stores KV by default: in the platform's folder for the user's caches."""

import os
import sys
from pathlib import Path

DEFAULT_CAP = 20 * 10**9  # bytes


def default_folder() -> Path:
    """Return splitinfer/kv in $XDG_CACHE_HOME if that is set, else in ~/Library/Caches (macOS) or ~/.cache."""
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / usual) / "splitinfer" / "kv"
