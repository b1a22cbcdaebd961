"""What replaces the functions of `mx.distributed` in the child of an rdma link, for the backend `jaccl`.

Operations are done when they are called, not when their arrays are evaluated; the child evaluates each at once, so its
order is the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.emulation.jaccl.device import Registration
from tests.emulation.jaccl.wire import DATA, SUM, Wire, hang
from tests.emulation.jaccl.world import Fault, What, World

BACKEND = "jaccl"
_GATHER_BYTES = 256
_SUM_BYTES = 4096


class EmulatedGroup:
    """A group of two over one cable."""

    def __init__(self, world: World, device: str, rank: int, wire: Wire, registration: Registration) -> None:
        self._world = world
        self._device = device
        self._rank = rank
        self._wire = wire
        self._operation = threading.Lock()
        self._faults: deque[Fault] = deque()
        self._has_summed = False
        self._received_size: int | None = None
        self._registration = registration

    def close(self) -> None:
        """As the end of the process does."""
        self._registration.close()
        self._wire.close()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def send(self, message: memoryview) -> None:
        with self._alone():
            if not self._has_summed:  # limit h
                self._has_summed = True
                return
            sent, fault = bytearray(message), self._next_fault()
            if fault is not None and fault.what is What.UNPLUG:
                os.kill(os.getpid(), signal.SIGSEGV)
            if fault is not None and fault.what is What.FLIP:
                sent[fault.at] ^= 0x10
            if fault is None or fault.what is not What.DROP:
                self._wire.send(DATA, sent)

    def _next_fault(self) -> Fault | None:
        """The one that is planned for this message."""
        planned = self._world.take_faults(self._device)
        if planned is not None:
            self._faults = deque(planned)
        if not self._faults:
            return None
        fault = self._faults[0]
        if fault.skip > 0:
            self._faults[0] = Fault(fault.what, fault.skip - 1, fault.at)
            return None
        return self._faults.popleft()

    def recv(self, num_bytes: int) -> bytearray:
        with self._alone(), self._registration.receiving():
            before, self._received_size = self._received_size, num_bytes
            if before not in (None, num_bytes):  # limit a
                hang()
            return self._wire.recv(DATA, num_bytes)

    def all_sum(self, values: list[float]) -> list[float]:
        """The sums of a few numbers with the peer's."""
        with self._alone(), self._registration.receiving():
            self._wire.send(SUM, json.dumps(values).encode().ljust(_SUM_BYTES))
            theirs = json.loads(bytes(self._wire.recv(SUM, _SUM_BYTES)))
            self._has_summed = True
            self._received_size = None
            return [own + other for own, other in zip(values, theirs, strict=True)]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One operation at a time: there is one completion queue (limit f)."""
        if not self._operation.acquire(blocking=False):
            self._world.count_overlap(self._device)
            raise RuntimeError("[emulated jaccl] two operations at once: each takes the other's completions")
        try:
            yield
        finally:
            self._operation.release()


def join(world: World, device: str, rank: int, gather: Callable[[bytes, int], bytes]) -> EmulatedGroup:
    """Join the peer's group; both ends meet by `gather`. Raises RuntimeError or ValueError with JACCL's texts."""
    port = world.ports.get(device)
    if port is None:
        raise RuntimeError(f"[jaccl] Could not find device {device} ({len(world.ports)} available)")
    if not port.peer:
        raise RuntimeError("[jaccl] Couldn't allocate protection domain")
    registration = world.device(device).register()
    try:
        return EmulatedGroup(world, device, rank, _meet(device, port.peer, rank, gather), registration)
    except BaseException:
        registration.close()
        raise


def _meet(device: str, peer: str, rank: int, gather: Callable[[bytes, int], bytes]) -> Wire:
    with sockets.create_server(("127.0.0.1", 0)) as server:
        mine = json.dumps({"device": device, "port": server.getsockname()[1]}).encode().ljust(_GATHER_BYTES)
        both = gather(mine, _GATHER_BYTES)
        theirs = json.loads(both[_GATHER_BYTES * (1 - rank) :][:_GATHER_BYTES])
        if theirs["device"] != peer:
            raise ValueError("[jaccl] Changing queue pair to RTR failed with errno 60")
        if rank == 0:
            socket = sockets.create_connection(("127.0.0.1", theirs["port"]))
        else:
            socket, _ = server.accept()
    return Wire(socket)


def install(world: World) -> None:
    """Replace MLX's functions in this process; groups of other backends work as before."""
    init = mx.distributed.init

    def init_or_join(strict: bool = False, backend: str = "any", **options: Any) -> Any:
        if backend != BACKEND:
            return init(strict=strict, backend=backend, **options)
        rank = int(os.environ["MLX_RANK"])
        row = json.loads(Path(os.environ["MLX_IBV_DEVICES"]).read_text())[rank]
        return join(world, row[1 - rank], rank, options["all_gather_factory"](rank, 2))

    mx.distributed.init = init_or_join
    for name, ours in (("send", _send), ("recv", _recv), ("all_sum", _all_sum)):
        setattr(mx.distributed, name, _by_group(ours, getattr(mx.distributed, name)))


def _by_group(ours: Callable[..., mx.array], real: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def call(*args: Any, group: Any, stream: Any = None) -> mx.array:
        return ours(group, *args) if isinstance(group, EmulatedGroup) else real(*args, group=group, stream=stream)

    return call


def _send(group: EmulatedGroup, array: mx.array, _dst: int) -> mx.array:
    mx.eval(array)
    group.send(memoryview(array).cast("B"))  # type: ignore[arg-type]
    return array


def _recv(group: EmulatedGroup, shape: tuple[int, ...], dtype: mx.Dtype, _src: int) -> mx.array:
    if dtype != mx.uint8 or len(shape) != 1:
        raise ValueError("[emulated jaccl] only bytes are received here")
    return mx.array(memoryview(group.recv(shape[0])))  # type: ignore[arg-type]


def _all_sum(group: EmulatedGroup, array: mx.array) -> mx.array:
    return mx.array(group.all_sum(array.tolist()), array.dtype)  # type: ignore[arg-type]
