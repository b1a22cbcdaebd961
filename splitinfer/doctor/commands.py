"""Asking the system's commands: each within a time, all at once, and none that is missing or hangs does any harm."""

import contextlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from splitinfer import cleanup

SECONDS = 15.0  # system_profiler takes a few; ibv_devinfo has been seen to hang for ever
_REAPING = 0.2


@dataclass(frozen=True, slots=True)
class Said:
    """What a command printed; ``None``, and why, where it printed nothing that counts."""

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


def ask_all(commands: Mapping[str, Sequence[str]] = COMMANDS, seconds: float = SECONDS) -> dict[str, Said]:
    """What each command says."""
    with ThreadPoolExecutor(len(commands)) as pool:
        said = pool.map(lambda command: ask(command, seconds), commands.values())
    return dict(zip(commands, said, strict=True))


def ask(command: Sequence[str], seconds: float) -> Said:
    """What one command says on its standard output, or why it says nothing."""
    name = command[0].rpartition("/")[2]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = cleanup.start(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            return Said(None, f"there is no {name} here" if isinstance(error, FileNotFoundError) else str(error))
        if not _ends_within(process, seconds):
            return Said(None, f"{name} has not answered for {seconds:g} s")
        out.seek(0)
        err.seek(0)
        text, complaint = (file.read(2**22).decode(errors="replace") for file in (out, err))
    if process.returncode != 0 and not text.strip():
        return Said(None, " ".join(f"{name} failed: {complaint or process.returncode}".split())[:300])
    return Said(text)


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends by itself; else it is killed, and not waited for: in a driver even SIGKILL waits."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAPING)
        return False
    return True
