"""Which device a process computes its stage on: MLX's default device, or an emulated accelerator.

``SPLITINFER_ACCELERATOR`` names a machine file (`tests/emulation`). Every process that inherits it, local workers too,
then computes on the CPU in the times of that machine's stage.
"""

import sys
from functools import cache
from itertools import pairwise

from splitinfer.engine.device.device import Device
from splitinfer.errors import ConfigError
from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import on_gpu
from splitinfer.system.gpu_roads import Road
from transports import AddressError
from transports.emulation import emulator

_SWITCH = 0.0001  # seconds until a thread that waits for the interpreter's lock gets it; reading a result waits thrice


def open_device(stage: int, bounds: tuple[int, ...], num_ranks: int = 1, *, sums: bool = True) -> Device:
    """The device of stage ``stage``, whose layers are ``bounds[stage]`` to ``bounds[stage + 1]``, or of one of
    ``num_ranks`` ranks that have these together. ``sums``: whether its steps sum with the other's.

    Raises:
        ConfigError: the machine file cannot be read, or does not fit the layout; or there are no emulators here.
    """
    file = emulated_machine()
    if file is None:
        return default_device()
    try:
        emulated = emulator("device")
    except AddressError as error:
        raise ConfigError(str(error)) from error
    _share_the_interpreter()
    layers = [end - start for start, end in pairwise(bounds)]
    device: Device = emulated.open_device(
        file, stage, layers, num_ranks, sums=sums, computes_at_launch=not Road.WAITER.is_open
    )
    return device


@cache
def default_device() -> Device:
    """MLX's default device. A process has one, whatever it computes there."""
    if on_gpu():
        _share_the_interpreter()
    return Device(computes_at_launch=not (on_gpu() and Road.WAITER.is_open))


def _share_the_interpreter() -> None:
    """Let the thread that waits for a step go on soon, though another builds the next one's graph."""
    sys.setswitchinterval(_SWITCH)
