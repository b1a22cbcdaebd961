"""Outputs of commands as they were recorded; ``recorded/README.txt`` says which are assumed."""

from pathlib import Path

from splitinfer.probes.evidence import Output

RECORDED = Path(__file__).parent / "recorded"
RDMA_READY = {
    "thunderbolt": "thunderbolt_tb5_studio.json",
    "hardware_ports": "networksetup.txt",
    "interfaces": "ifconfig_ready.txt",
    "rdma": "rdma_ctl_enabled.txt",
    "devices": "ibv_devices_three.txt",
    "states": "ibv_devinfo_active.txt",
}
"""Of a Mac whose RDMA can be used: the file of each command's output."""


def said(name: str) -> Output:
    """What a recorded command said; without a name, that there is no such command."""
    return Output((RECORDED / name).read_text(encoding="utf-8")) if name else Output(None, "there is none here")
