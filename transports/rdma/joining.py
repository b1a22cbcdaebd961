"""Joins a group of `mx.distributed` with one peer, once in a process: MLX keeps a group until the process ends.

While it joins, MLX holds the GIL and waits without limit; the caller sets an alarm.
"""

from __future__ import annotations

import json
import os
import socket as sockets
import struct
import tempfile
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from transports.base import FrameError
from transports.rdma.address import RING

Exchange = Callable[[bytes], bytes]
"""Exchanges bytes with the peer and returns the data of both, in the order of ranks."""

_HEAD_START = 0.03  # rank 0 of a ring listens first; MLX retries a connection that comes too early after a second
_ADDRESS = struct.Struct("<4sH")


def join_group(backend: str, rank: int, device: str, own: str, towards: str, gather: Exchange) -> mx.distributed.Group:
    """Join a group with a peer and return it. `own`: this end's IPv4 address; "": the one that reaches the host
    `towards`."""
    os.environ["MLX_RANK"] = str(rank)
    if backend == RING:
        return _join_ring(rank, own, towards, gather)

    with _file([[None, device], [device, None]]) as file:  # only this rank's row is used
        os.environ["MLX_IBV_DEVICES"] = file.name
        os.environ["MLX_JACCL_COORDINATOR"] = "127.0.0.1:1"  # must be set, but is not used
        return mx.distributed.init(
            strict=True,
            backend=backend,
            all_gather_factory=lambda _rank, _size: lambda mine, _num_bytes: gather(bytes(mine)),
        )


def _join_ring(rank: int, own: str, towards: str, gather: Exchange) -> mx.distributed.Group:
    """Join a ring. If the peer's host is known, only its port comes from the peer, so that it cannot make this machine
    connect to a third one."""
    own, port = _free_port(own, towards)
    gathered = gather(_ADDRESS.pack(sockets.inet_aton(own), port))
    both = list(_ADDRESS.iter_unpack(gathered))
    hosts = [towards or sockets.inet_ntoa(host) for host, _ in both]
    hosts[rank] = own
    time.sleep(_HEAD_START * rank)
    with _file([[f"{host}:{port}"] for host, (_, port) in zip(hosts, both, strict=True)]) as file:
        os.environ["MLX_HOSTFILE"] = file.name
        return mx.distributed.init(strict=True, backend=RING)


def check_sum(group: mx.distributed.Group, rank: int) -> None:
    """Add one number with the peer. Raises FrameError if the group does not have two members that add up to 3."""
    total = mx.distributed.all_sum(mx.array([rank + 1.0]), group=group, stream=mx.cpu)
    if group.size() != 2 or total.item() != 3.0:
        raise FrameError(f"a group of {group.size()} adds up to {total.item()}, not two to 3")


def _free_port(own: str, towards: str) -> tuple[str, int]:
    """Return `own`, or if it is "" the address at which the host `towards` reaches this machine, and a free port."""
    try:
        if not own:
            with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as route:
                route.connect((towards, 9))  # sends nothing
                own = str(route.getsockname()[0])
        with sockets.socket() as free:
            free.bind((own, 0))
            return own, int(free.getsockname()[1])
    except OSError as problem:
        raise FrameError(f"ring cannot be used towards {towards}: {problem}") from None


def _file(content: object) -> Any:
    """Return a temporary JSON file for MLX to read."""
    file = tempfile.NamedTemporaryFile("w", prefix="splitinfer-rdma-", suffix=".json")  # noqa: SIM115 - the caller closes it
    json.dump(content, file)
    file.flush()
    return file
