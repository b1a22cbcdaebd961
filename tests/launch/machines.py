"""Machines for `splitinfer up`, as Linux namespaces: each with its own network, processes, users, homes and sshd.

    lab = Lab(folder)                      root only; a bridge 10.77.0.0/24 in a network namespace of this process
    mini = lab.machine("mini", ["eve"])    an sshd of its own at mini.local:22

The processes of a machine cannot see those of another, and nothing of it outlives this process. Files of the real
machine are seen, the checkout among them, but /etc/{passwd,group,shadow,hosts,ssh}, /home, /mnt, /tmp, /run and /root.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from processes import until

SSHD = "/usr/sbin/sshd"
FIRST_USER = 3001
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000  # sched.h
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18  # sys/mount.h
_CLONE = Path(__file__).resolve().parents[2]

_SSHD_CONFIG = """\
HostKey /etc/ssh/host_key
UsePAM no
PasswordAuthentication yes
KbdInteractiveAuthentication no
PidFile none
PrintMotd no
"""

_INSIDE = """\
set -e
hostname {name}
ip link set lo up
for each in passwd group shadow hosts; do mount --bind {folder}/etc/$each /etc/$each; done
mount --bind {folder}/etc/ssh /etc/ssh
mount --bind {folder}/home /home
mount -t tmpfs -o mode=755 mnt /mnt
mkdir /mnt/pyenv /mnt/clone
if [ -d /root/.pyenv ]; then mount --bind /root/.pyenv /mnt/pyenv; fi
mount --bind {clone} /mnt/clone
mount -t tmpfs -o mode=755 root /root
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 tmp /tmp
mkdir -p {clone} /root/.pyenv /run/sshd
mount --bind /mnt/clone {clone}
mount --bind /mnt/pyenv /root/.pyenv
exec sleep infinity
"""


def is_possible() -> str | None:
    """Why there can be no machines here; ``None``: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it takes root on Linux"
    lacking = [each for each in (SSHD, "unshare", "nsenter", "ip", "ssh-keygen") if shutil.which(each) is None]
    return f"there is no {', '.join(lacking)} here" if lacking else None


def _run(*words: str, text: str | None = None) -> str:
    return subprocess.run(words, input=text, check=True, capture_output=True, text=True).stdout


@dataclass
class Machine:
    """One machine. ``pid``: of its first process. ``folder``: what it has of its own, outside of it."""

    name: str
    address: str
    folder: Path
    pid: int
    sshd: "subprocess.Popen[bytes] | None" = None
    users: dict[str, int] = field(default_factory=dict)

    def home(self, user: str) -> Path:
        """A user's home, as seen from outside."""
        return self.folder / "home" / user

    def command(self, user: str, words: Sequence[str]) -> list[str]:
        """The words that run a command here as a user whose login has set nothing but PATH and HOME."""
        number = str(self.users[user])
        variables = {"HOME": f"/home/{user}", "USER": user, "LOGNAME": user, "TERM": "xterm", "LANG": "C.UTF-8"}
        variables |= {"PATH": "/usr/local/bin:/usr/bin:/bin"}
        inside = ["nsenter", "-t", str(self.pid), "-m", "-u", "-n", "-p"]
        as_user = ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", "--inh-caps=-all"]
        told = [f"{name}={value}" for name, value in variables.items()]
        return [*inside, *as_user, "env", "-i", "-C", f"/home/{user}", *told, *words]

    def run(self, user: str, *words: str, seconds: float = 300.0) -> "subprocess.CompletedProcess[str]":
        """Run a command here to its end."""
        return subprocess.run(
            self.command(user, words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip

    def write(self, user: str, path: str, text: str, mode: int = 0o600) -> None:
        """A file in a user's home."""
        file = self.home(user) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        for each in (file, *file.relative_to(self.home(user)).parents):
            os.chown(self.home(user) / each, self.users[user], self.users[user])

    def new_host_key(self) -> None:
        """Make a host key, as an installation does, and run sshd with it."""
        self.stop_sshd()
        key = self.folder / "etc" / "ssh" / "host_key"
        for each in (key, key.with_suffix(".pub")):
            each.unlink(missing_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        self.start_sshd()

    @property
    def host_key(self) -> str:
        return (self.folder / "etc" / "ssh" / "host_key.pub").read_text().strip()

    def start_sshd(self) -> None:
        self.sshd = subprocess.Popen(
            ["nsenter", "-t", str(self.pid), "-m", "-u", "-n", "-p", SSHD, "-D", "-f", "/etc/ssh/sshd_config"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=(self.folder / "sshd.log").open("ab"),
        )  # fmt: skip
        probe = ["nsenter", "-t", str(self.pid), "-n", "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/22"]
        until(lambda: subprocess.run(probe, capture_output=True, check=False).returncode == 0, "sshd listens")

    def stop_sshd(self) -> None:
        """Nobody gets in any more; the connections that are there stay."""
        if self.sshd is not None:
            self._listening().kill()
            self.sshd.wait()
            self.sshd = None

    def drop_connections(self) -> int:
        """Cut every ssh connection to this machine; how many processes held them."""
        sessions = [each for each in self._listening().children(recursive=True) if each.name() == "sshd"]
        for each in sessions:
            each.kill()
        return len(sessions)

    def _listening(self) -> psutil.Process:
        """The sshd that listens: what nsenter has started."""
        return psutil.Process(self.sshd.pid).children()[0]


class Lab:
    """Machines on one network. Leaves this process in namespaces of its own for mounts and networks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._machines = folder, list[Machine]()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare(2)")
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        for words in ("link add lab type bridge", "link set lab up", "link set lo up"):
            _run("ip", *words.split())
        self._hosts = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i} {n}.local {n}\n" for n, i in _ADDRESSES.items())

    def machine(self, name: str, users: Sequence[str]) -> Machine:
        """A machine with an sshd; its users have no keys."""
        folder = self._folder / name
        self._furnish(folder, name, users)
        inside = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--uts", "--pid", "--net",
                  "--fork", "--kill-child", "--mount-proc",
                  "sh", "-c", _INSIDE.format(name=name, folder=folder, clone=_CLONE)]  # fmt: skip
        log = (folder / "start.log").open("ab")
        keeper = subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        first = psutil.Process(keeper.pid)
        until(lambda: any(each.name() == "sleep" for each in first.children()), f"{name} is up")
        made = Machine(name, f"10.77.0.{_ADDRESSES[name]}", folder, first.children()[0].pid)
        made.users = {user: FIRST_USER + i for i, user in enumerate(users)}
        self._connect(made)
        self._machines.append(made)
        made.new_host_key()
        return made

    def _furnish(self, folder: Path, name: str, users: Sequence[str]) -> None:
        etc = folder / "etc"
        (etc / "ssh").mkdir(parents=True)
        (etc / "ssh" / "sshd_config").write_text(_SSHD_CONFIG)
        (etc / "ssh" / "ssh_config").write_text("")
        people = [("root", 0, "/root"), ("sshd", 104, "/run/sshd")]
        people += [(user, FIRST_USER + i, f"/home/{user}") for i, user in enumerate(users)]
        (etc / "passwd").write_text("".join(f"{n}:x:{i}:{i}::{home}:/bin/bash\n" for n, i, home in people))
        (etc / "group").write_text("".join(f"{n}:x:{i}:\n" for n, i, _ in people))
        (etc / "shadow").write_text("".join(f"{n}:*:19000:0:99999:7:::\n" for n, _, _ in people))
        (etc / "hosts").write_text(self._hosts)
        for user, number, _ in people[2:]:
            home = folder / "home" / user
            home.mkdir(parents=True, mode=0o700)
            os.chown(home, number, number)

    def _connect(self, machine: Machine) -> None:
        here, there = f"to-{machine.name}", "eth0"
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", str(machine.pid))
        _run("ip", "link", "set", here, "master", "lab", "up")
        inside = ("nsenter", "-t", str(machine.pid), "-n", "ip")
        _run(*inside, "address", "add", f"{machine.address}/24", "dev", there)
        _run(*inside, "link", "set", there, "up")

    def close(self) -> None:
        """End every process of every machine."""
        for machine in self._machines:
            os.kill(machine.pid, signal.SIGKILL)  # the first process of a PID namespace takes the others along


_ADDRESSES = {"studio": 1, "mini": 2, "air": 3}
