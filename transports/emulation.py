"""The way to the emulators: accelerators, links and RDMA devices that are slower, or worse, than what is here.

They are the tests' (`tests/emulation`), for whoever works on this project: a checkout has them, an installed package
does not. Nothing else that is installed imports the tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transports.base import AddressError


def emulator(name: str) -> Any:
    """Return the emulators' module of that name.

    Raises AddressError where there is none.
    """
    try:
        from tests import emulation
    except ImportError:
        raise AddressError(
            "emulated accelerators and links are in the source, not in the installed package; run this in a checkout"
        ) from None
    return import_module(f"{emulation.__name__}.{name}")
