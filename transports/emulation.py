"""Loads the emulators: accelerators, links and RDMA devices that are slower, or worse, than the real ones here.

They belong to the tests (`tests/emulation`) and serve the developers of this project: a checkout has them, an installed
package does not. No other installed module imports the tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transports.base import AddressError


def emulator(name: str) -> Any:
    """Return the emulators' module `name`. Raises AddressError if this installation has no emulators."""
    try:
        from tests import emulation
    except ImportError:
        raise AddressError(
            "emulated accelerators and links are in the source, not in the installed package; run this in a checkout"
        ) from None
    return import_module(f"{emulation.__name__}.{name}")
