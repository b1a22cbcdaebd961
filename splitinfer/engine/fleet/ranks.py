"""Stages across two machines, as the coordinator sees them: how their ranks meet, and one Ready message for both.

The ranks exchange sums over MLX's own sockets (``ring``) or RDMA (``jaccl``), without encryption. RDMA over Thunderbolt
uses a cable. Sockets may use any network, so they are refused unless they stay on a cable.
"""

import socket
from collections.abc import Sequence
from dataclasses import replace

from splitinfer.common.endpoint import Endpoint
from splitinfer.core.kv.rewind import least_rewind
from splitinfer.core.layout import StageSpec
from splitinfer.core.link_transport import RING
from splitinfer.engine.links.cables import leads_over_cable, would_cross
from splitinfer.errors import ConfigError, WorkerUnreachable
from splitinfer.wire.messages import Half, Ready

_HERE = "127.0.0.1"


def halves_of(spec: StageSpec, *, insecure: bool) -> tuple[Half, ...]:
    """Return the half of each rank of a stage. ``insecure``: sums may cross any network.

    Raises:
        ConfigError: the sums would cross a network that is no direct cable, and ``insecure`` is false.
        WorkerUnreachable: a rank's host has no IPv4 address.
    """
    remote = ["" if one.is_local else _ipv4(one) for one in spec.ranks]
    hosts = remote if any(remote) else [_HERE, _HERE]
    if spec.sums == RING and not insecure and not all(remote):
        # This machine is one of the two. Workers check their cables themselves (``worker.ranks``).
        for host in filter(None, hosts):
            if not leads_over_cable(host):
                raise ConfigError(f"the sums of stage {spec.name} {would_cross(host)}")
    devices = (spec.sums_device or ":").split(":")
    return tuple(
        Half(rank, spec.sums, devices[rank], hosts[rank], hosts[1 - rank], insecure) for rank in range(len(hosts))
    )


def _ipv4(rank: StageSpec) -> str:
    host = Endpoint.parse(str(rank.address)).host
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise WorkerUnreachable(f"worker {rank.name}: sums need an IPv4 address, and {host} has none") from None


def as_one(said: Sequence[Ready]) -> Ready:
    """Return one Ready for all ranks of a stage, with the abilities that all of them have."""
    first, *others = said
    if not others:
        return first
    kept = [set(one.kept) for one in said if one.kept is not None]
    everywhere = (
        None if len(kept) < len(said) else tuple(key for key in first.kept or () if all(key in it for it in kept))
    )
    return replace(
        first,
        kv_bytes_stored=max(one.kv_bytes_stored for one in said),
        free_bytes=min(one.free_bytes for one in said),
        sum_seconds=max(one.sum_seconds for one in said),
        rewind=least_rewind(one.rewind for one in said),
        keeps_blocks=all(one.keeps_blocks for one in said),
        kept=everywhere,
    )
