"""Where this user's processes on this machine leave word for each other: in the platform's folder for caches."""

import os
import platform
from pathlib import Path


def of_this_host(what: str) -> Path:
    """The folder ``splitinfer/WHAT/HOST`` in $XDG_CACHE_HOME if that is set, else in ~/Library/Caches (macOS) or
    ~/.cache. The host is in the name because home folders may be shared, and processes are not."""
    usual = Path("Library", "Caches") if platform.system() == "Darwin" else Path(".cache")
    caches = os.environ.get("XDG_CACHE_HOME")
    host = "".join(c if c.isalnum() or c in "-." else "_" for c in platform.node()) or "localhost"
    return (Path(caches) if caches else Path.home() / usual) / "splitinfer" / what / host
