"""Where this user's processes on this machine leave word for each other: in the folder for caches."""

import platform
from pathlib import Path

from splitinfer.places import caches


def of_this_host(what: str) -> Path:
    """The folder WHAT/HOST among the caches. The host is in the name because home folders may be shared, and processes
    are not."""
    host = "".join(c if c.isalnum() or c in "-." else "_" for c in platform.node()) or "localhost"
    return caches() / what / host
