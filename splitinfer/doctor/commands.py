"""Runs the system's commands, all at once and each with a timeout; one that is missing or hangs does no harm."""

import contextlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from splitinfer import cleanup

SECONDS = 15.0  # system_profiler takes a few; ibv_devinfo has been seen to hang for ever
_REAPING = 0.2  # seconds


@dataclass(frozen=True, slots=True)
class Output:
    """The text that a command printed; ``None`` where it failed, and ``why``."""

    text: str | None
    why: str = ""


COMMANDS: Mapping[str, tuple[str, ...]] = {
    "macos": ("/usr/bin/sw_vers", "-productVersion"),
    "wired_limit": ("/usr/sbin/sysctl", "iogpu.wired_limit_mb"),
    "thunderbolt": ("/usr/sbin/system_profiler", "SPThunderboltDataType", "-json"),
    "hardware_ports": ("/usr/sbin/networksetup", "-listallhardwareports"),
    "interfaces": ("/sbin/ifconfig",),
    "rdma": ("rdma_ctl", "status"),
    "devices": ("ibv_devices",),
    "states": ("ibv_devinfo",),
}


def run_commands(commands: Mapping[str, Sequence[str]] = COMMANDS, seconds: float = SECONDS) -> dict[str, Output]:
    """The output of each command, by its key. ``seconds``: the timeout of each."""
    with ThreadPoolExecutor(len(commands)) as pool:
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
