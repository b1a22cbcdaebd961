"""What was found as one JSON document."""

from typing import Any

from splitinfer.discovery.choosing import Way
from splitinfer.discovery.result import Discovery, Found, Tried, address_of
from splitinfer.discovery.workers import Worker


def document(discovery: Discovery) -> dict[str, Any]:
    """The document: seconds in seconds, memory in bytes, speeds in Mb/s."""
    return {
        "means": discovery.means or None,
        "seconds": round(discovery.seconds, 3),
        "problem": discovery.problem or None,
        "workers": [_found(each) for each in discovery.found],
        "stale": list(discovery.stale),
        "interfaces": [_tried(each) for each in discovery.tried],
    }


def _found(found: Found) -> dict[str, Any]:
    announcement = found.worker.announcement
    versions = announcement.versions
    return {
        "name": announcement.name,
        "id": announcement.id,
        "address": found.address,
        "ways": [_way(each, found.worker) for each in found.ways],
        "fingerprint": announcement.fingerprint or None,
        "known_as": found.known_as or None,
        "other_key_known": found.is_impostor,
        "here": found.is_here,
        "device": announcement.device or None,
        "memory": announcement.memory or None,
        "free": announcement.free or None,
        "versions": {
            "protocol": versions.protocol,
            "splitinfer": versions.splitinfer,
            "mlx": versions.mlx,
            "mlx_lm": versions.mlx_lm,
        },
        "version_difference": found.difference,
    }


def _way(way: Way, worker: Worker) -> dict[str, Any]:
    interface = way.interface
    return {
        "address": address_of(way, worker),
        "interface": None if interface is None else interface.name,
        "kind": None if interface is None else interface.kind.value,
        "speed": None if interface is None else interface.speed or None,
        "round_trip": way.seconds,
        "problem": way.problem or None,
    }


def _tried(tried: Tried) -> dict[str, Any]:
    return {
        "name": tried.interface.name,
        "kind": tried.interface.kind.value,
        "addresses": [str(each.ip) for each in tried.interface.networks],
        "others": tried.num_others,
        "problem": tried.problem or None,
    }
