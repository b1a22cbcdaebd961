"""Runs the system's commands, all at once and each with a timeout; one that is missing or hangs does no harm."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from splitinfer import cleanup
from splitinfer.doctor.findings.finding import Output
from splitinfer.doctor.findings.firewall import TOOL
from splitinfer.doctor.findings.process import LABEL
from splitinfer.doctor.parsing.nvidia import FIELDS

SECONDS = 15.0  # system_profiler takes a few; ibv_devinfo has been seen to hang for ever
_REAPING = 0.2  # seconds


MACOS: Mapping[str, tuple[str, ...]] = {
    "macos": ("/usr/bin/sw_vers", "-productVersion"),
    "wired_limit": ("/usr/sbin/sysctl", "iogpu.wired_limit_mb"),
    "memory": ("/usr/bin/vm_stat",),
    "swap": ("/usr/sbin/sysctl", "vm.swapusage"),
    "power": ("/usr/bin/pmset", "-g"),
    "battery": ("/usr/bin/pmset", "-g", "batt"),
    "assertions": ("/usr/bin/pmset", "-g", "assertions"),
    "thermal": ("/usr/bin/pmset", "-g", "therm"),
    "firewall": (TOOL, "--getglobalstate"),
    "firewall_block_all": (TOOL, "--getblockall"),
    "firewall_stealth": (TOOL, "--getstealthmode"),
    "firewall_apps": (TOOL, "--listapps"),
    "agent": ("/bin/launchctl", "print", f"gui/{os.getuid()}/{LABEL}"),
    "daemon": ("/bin/launchctl", "print", f"system/{LABEL}"),
    "thunderbolt": ("/usr/sbin/system_profiler", "SPThunderboltDataType", "-json"),
    "hardware_ports": ("/usr/sbin/networksetup", "-listallhardwareports"),
    "interfaces": ("/sbin/ifconfig",),
    "rdma": ("rdma_ctl", "status"),
    "devices": ("ibv_devices",),
    "states": ("ibv_devinfo",),
}

LINUX: Mapping[str, tuple[str, ...]] = {
    "nvidia": ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"),
}


def commands_of(system: str) -> Mapping[str, tuple[str, ...]]:
    """The commands to run on a system ("Darwin", "Linux" ...), by their keys."""
    return {"Darwin": MACOS, "Linux": LINUX}.get(system, {})


def route_command(system: str, address: str) -> tuple[str, ...]:
    """The command that says by which interface an address is reached."""
    if system == "Darwin":
        return ("/sbin/route", "-n", "get", *(("-inet6",) if ":" in address else ()), address)
    return ("ip", "-json", "route", "get", address)


def run_commands(commands: Mapping[str, Sequence[str]], seconds: float = SECONDS) -> dict[str, Output]:
    """The output of each command, by its key. ``seconds``: the timeout of each."""
    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        outputs = pool.map(lambda command: run_command(command, seconds), commands.values())
    return dict(zip(commands, outputs, strict=True))


def run_command(command: Sequence[str], seconds: float) -> Output:
    """The standard output of one command, or why there is none."""
    name = command[0].rpartition("/")[2]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = cleanup.start(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            return Output(None, f"there is no {name} here" if isinstance(error, FileNotFoundError) else str(error))
        if not _ends_within(process, seconds):
            return Output(None, f"{name} has not answered for {seconds:g} s")
        out.seek(0)
        err.seek(0)
        text, complaint = (file.read(2**22).decode(errors="replace") for file in (out, err))
    if process.returncode != 0 and not text.strip():
        return Output(None, " ".join(f"{name} failed: {complaint or process.returncode}".split())[:300])
    return Output(text)


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ends in time; else it is killed, and not waited for: a call in a driver delays even SIGKILL."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAPING)
        return False
    return True
