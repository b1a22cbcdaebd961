"""Where a machine keeps KV if nobody says where: in the user's folder for caches, as the platform has it."""

import os
import sys
from pathlib import Path

DEFAULT_CAP = 20 * 10**9  # bytes


def default_folder() -> Path:
    """~/Library/Caches/splitinfer/kv on macOS; $XDG_CACHE_HOME/splitinfer/kv, or ~/.cache/splitinfer/kv, elsewhere."""
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "splitinfer" / "kv"
