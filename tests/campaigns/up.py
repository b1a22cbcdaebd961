"""`splitinfer up`, and a newcomer's evening, on machines that are namespaces with an sshd, users and processes.

    python -m tests.campaigns up --minutes 10                  # all scenes, in their order; two or three minutes
    python -m tests.campaigns up --minutes 10 --until second   # the first ones

Root, Linux, sshd. Each scene prints what a person sees; no scene is begun when the minutes are over. The other machine
begins with nothing but sshd and a stand-in for uv, which installs the wheel that is brought along into an environment
that finds the dependencies on this disk: nothing is downloaded.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
from machines import Lab, Machine, is_possible
from processes import until

from splitinfer.engine.versions import own_versions
from splitinfer.launch.own import install_line

from . import newcomer
from .report import Missing, Report

ROOT = Path(__file__).resolve().parents[2]
PROMPT = ("--temp", "0", "--prompt", "The wolf", "--max-tokens")
ALL = ("--use-all",)

_UV = """\
#!/bin/sh
# uv tool install --force WHEEL --with ...
set -e
tool=$HOME/.local/share/uv/tools/splitinfer
{python} -m venv --clear --without-pip "$tool"
echo {packages} > "$tool/lib/{version}/site-packages/dependencies.pth"
{python} -m pip --python "$tool" -q install --no-deps --no-index --disable-pip-version-check "$4"
mkdir -p "$HOME/.local/bin"
ln -sf "$tool/bin/splitinfer" "$HOME/.local/bin/splitinfer"
"""


class Campaign:
    """The machines, and the report."""

    def __init__(self, folder: Path, report: Report) -> None:
        self.check = report.check
        self.wheel = _wheel(folder)
        self.lab = Lab(folder)
        try:
            self._furnish()
        except BaseException:
            self.lab.close()
            raise

    def _furnish(self) -> None:
        """The wheel is installed at studio and air, whose users have keys for ssh."""
        self.studio = self.lab.machine("studio", ["eve", "anna"])
        self.mini = self.lab.machine("mini", ["eve", "anna"])
        self.air = self.lab.machine("air", ["eve"])
        for machine in (self.studio, self.mini, self.air):
            for user in machine.users:
                machine.write(user, ".local/bin/uv", _uv(), 0o755)
        for machine in (self.studio, self.air):
            for user in machine.users:
                self._install(machine, user)
                key = "mkdir -p -m 700 .ssh && ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519"
                self.expect(machine.run(user, "sh", "-c", key))

    def _install(self, machine: Machine, user: str) -> None:
        machine.write(user, self.wheel.name, "")
        (machine.home(user) / self.wheel.name).write_bytes(self.wheel.read_bytes())
        self.expect(machine.run(user, "sh", "-c", f".local/bin/uv tool install --force ./{self.wheel.name}"))

    def close(self) -> None:
        self.lab.close()

    def expect(self, done: "subprocess.CompletedProcess[str]", *texts: str, code: int = 0) -> None:
        said = done.stdout + done.stderr
        self.check(done.returncode == code, f"exit code {done.returncode}, not {code}: {said[-600:]}")
        for text in texts:
            self.check(text in " ".join(said.split()), f"it does not say {text!r}: {said[-600:]}")

    def cli(self, machine: Machine, user: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command of splitinfer, as a person sees it."""
        print(f"  {user}@{machine.name}$ splitinfer {' '.join(words)}")
        began = time.monotonic()
        done = machine.run(user, f"/home/{user}/.local/bin/splitinfer", *words)
        for line in (done.stderr + done.stdout).splitlines():
            print(f"  | {line}")
        print(f"  ({time.monotonic() - began:.1f} s, exit code {done.returncode})")
        return done

    def answers(self, machine: Machine, user: str, *words: str) -> str:
        """What `up` says beside the first answer, which every machine and cut must give."""
        done = self.cli(machine, user, "up", *words, *PROMPT, "16")
        self.expect(done)
        self.check(done.stdout == self.answer, f"another answer: {done.stdout!r}")
        return " ".join(done.stderr.split())

    def begun(self, *words: str) -> "subprocess.Popen[bytes]":
        """eve's command on studio, under way."""
        print(f"  eve@studio$ splitinfer {' '.join(words)}")
        command = self.studio.command("eve", ["/home/eve/.local/bin/splitinfer", *words])
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def one_worker_runs(self) -> None:
        self.check(len(self.workers(self.mini)) == 1, f"on mini {len(self.workers(self.mini))} workers run")

    # ----- scenes ------------------------------------------------------------------------------

    def strangers(self) -> None:
        """mini has never been connected to, then lets nobody in without a password, then has no splitinfer."""
        done = self.cli(self.studio, "eve", "up", "mini.local", "--model", "demo", "--prepare")
        self.expect(done, "`ssh mini.local` must work without a question", "Host key verification failed", code=1)
        known = self.studio.home("eve") / ".ssh/known_hosts"
        self.check(not known.exists() or not known.read_text(), "a host key was accepted unseen")
        self.accept_host_key(self.studio, "eve", self.mini)
        done = self.cli(self.studio, "eve", "up", "mini.local", "--model", "demo", "--prepare")
        self.expect(done, "Permission denied (publickey", code=1)
        self.let_in(self.studio, "eve", self.mini)
        done = self.cli(self.studio, "eve", "up", "mini.local", "--model", "demo", "--prepare")
        self.expect(done, "mini: splitinfer was not found there", code=1)

    def first(self) -> None:
        """The line that `up` prints installs splitinfer; then one command, from nothing to tokens."""
        said = self.cli(self.studio, "eve", "up", "mini.local", "--model", "demo", "--prepare").stderr
        line = re.search(r"^    (ssh .*)$", said, re.MULTILINE)
        self.check(line, "no line to install")
        self.check(line[1] == install_line("mini.local", own_versions(), Path(f"/home/eve/{self.wheel.name}")), line[1])
        print(f"  eve@studio$ {line[1]}")
        self.expect(self.studio.run("eve", "sh", "-c", line[1]))
        done = self.cli(self.studio, "eve", "up", "mini.local", "--model", "demo", *ALL, *PROMPT, "16")
        self.expect(done, "worker started, port 5577", "each machine has the other's key", "Planned for")
        self.answer = done.stdout
        self.check(len(self.answer) > 20, "there is no answer")
        self.one_worker_runs()

    def second(self) -> None:
        """No words are needed any more."""
        said = self.answers(self.studio, "eve", *ALL)
        self.check("a worker is there, started by `up`" in said, said)
        self.one_worker_runs()

    def copies(self) -> None:
        """A model that only studio has: mini gets the weights of its layers from there, and the next time nothing."""
        model, store = self.studio.home("eve") / "tale", self.mini.home("eve") / ".local/share/splitinfer/models"
        shutil.copytree(ROOT / "splitinfer/demo/target", model)
        uid = self.studio.users["eve"]
        for path in (model, *model.iterdir()):
            os.chown(path, uid, uid)
        whole = (model / "model.safetensors").stat().st_size
        said = self.answers(self.studio, "eve", "mini.local", "--model", "/home/eve/tale", *ALL)
        self.check("a worker is there" in said, said)
        before = _files(store)
        copied = sum(size for _, size in before.values())
        print(f"  mini has {copied / 1e6:.2f} MB of a model of {whole / 1e6:.2f} MB")
        self.check(0 < copied < whole, "mini has nothing, or all, of the model")
        self.answers(self.studio, "eve", *ALL)
        self.check(_files(store) == before, "something was copied again")
        self.expect(self.cli(self.studio, "eve", "up", "mini.local", "--model", "demo", "--prepare"))

    def repl(self) -> None:
        """On a terminal it opens the REPL; the worker stays when that is left."""
        evening = newcomer.Evening(self)
        with evening.terminal(self.studio, "splitinfer", "up") as terminal:
            self.check("Planned for" in evening.sees(terminal, newcomer.PROMPT), "it does not say how it was cut")
            terminal.type("/quit\r")
            terminal.end()
        self.one_worker_runs()

    def two_users(self) -> None:
        """anna of the same machines is told that the port is in use, takes another, and stops only her own worker."""
        self.accept_host_key(self.studio, "anna", self.mini)
        self.let_in(self.studio, "anna", self.mini)
        self._install(self.mini, "anna")
        done = self.cli(self.studio, "anna", "up", "mini.local", "--model", "demo", "--prepare")
        self.expect(done, "port 5577 is in use by another program", "take another port, such as 5578", code=1)
        said = self.answers(self.studio, "anna", "mini.local:5578", "--model", "demo")
        self.check("worker started, port 5578" in said, said)
        self.expect(self.cli(self.studio, "anna", "down"), "the worker at port 5578 is stopped")
        self.one_worker_runs()

    def two_coordinators(self) -> None:
        """The same user at another machine uses the worker, and leaves it running."""
        self.accept_host_key(self.air, "eve", self.mini)
        self.let_in(self.air, "eve", self.mini)
        done = self.cli(self.air, "eve", "up", "mini.local", "--model", "demo", *PROMPT, "16")
        self.expect(done, "a worker is there, started by `up` of studio")
        self.expect(self.cli(self.air, "eve", "down"), "still runs: this `up` did not start it")
        self.one_worker_runs()

    def dropped(self) -> None:
        """ssh is cut while an answer is made, which goes on; and while a worker starts, which is found again."""
        running = self.begun("up", "mini.local", *PROMPT, "400")
        running.stdout.read(20)  # type: ignore[union-attr]
        held = self.mini.drop_connections()
        self.mini.stop_sshd()
        out, err = running.communicate(timeout=300)
        self.mini.start_sshd()
        self.check(held == 0, "ssh connections are held while a pipeline serves")
        self.check(running.returncode == 0 and len(out) > 100, f"the answer did not go on: {err[-400:]!r}")
        self.expect(self.cli(self.studio, "eve", "down"), "the worker at port 5577 is stopped")
        self.check(not self.workers(self.mini), "a worker is left over")
        running = self.begun("up", *ALL, *PROMPT, "16")
        until(lambda: self.workers(self.mini), "a worker starts")
        self.mini.drop_connections()
        out, err = running.communicate(timeout=300)
        self.check(b"the connection broke off; trying once more" in err, f"it does not say that ssh broke off: {err!r}")
        self.check(running.returncode == 0 and out.decode() == self.answer, f"no answer after a cut: {err[-400:]!r}")
        self.one_worker_runs()

    def served(self) -> None:
        """`--serve`: the server, whose client gets the same text."""
        running = self.begun("up", "--serve", "8099")
        get = r"printf 'GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3; cat <&3"
        ask = self.studio.command("eve", ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/8099; {get}"])
        until(lambda: b"demo" in subprocess.run(ask, capture_output=True, check=False).stdout, "the server answers")
        psutil.Process(running.pid).children()[0].terminate()  # what nsenter runs
        running.communicate(timeout=60)
        self.one_worker_runs()

    def changed_key(self) -> None:
        """mini has another host key: nothing is sent there, and its worker goes on."""
        self.mini.new_host_key()
        done = self.cli(self.studio, "eve", "up", "--prepare")
        self.expect(done, "REMOTE HOST IDENTIFICATION HAS CHANGED", code=1)
        self.one_worker_runs()
        self.expect(self.cli(self.studio, "eve", "down"), "HAS CHANGED", code=1)
        self.accept_host_key(self.studio, "eve", self.mini)
        self.expect(self.cli(self.studio, "eve", "down"), "the worker at port 5577 is stopped")
        self.check(not self.workers(self.mini), "a worker is left over")

    # ----- what people do ----------------------------------------------------------------------

    def accept_host_key(self, machine: Machine, user: str, other: Machine) -> None:
        """A person has compared the fingerprint and said yes."""
        machine.write(user, ".ssh/known_hosts", f"{other.name}.local {other.host_key}\n")

    def let_in(self, machine: Machine, user: str, other: Machine) -> None:
        """ssh-copy-id."""
        there = other.home(user) / ".ssh" / "authorized_keys"
        before = there.read_text() if there.exists() else ""
        key = (machine.home(user) / ".ssh" / "id_ed25519.pub").read_text()
        other.write(user, ".ssh/authorized_keys", before + key)

    def workers(self, machine: Machine) -> list[str]:
        """The command lines of workers on a machine."""
        inside = ["nsenter", "-t", str(machine.pid), "-m", "-p", "ps", "-axww", "-o", "command="]
        shown = subprocess.run(inside, capture_output=True, text=True, check=True).stdout
        return [line for line in shown.splitlines() if " -m splitinfer worker " in line]


SCENES: tuple[Callable[[Any], None], ...] = (
    Campaign.strangers, Campaign.first, Campaign.second, Campaign.copies, Campaign.repl,
    Campaign.two_users, Campaign.two_coordinators, Campaign.dropped, Campaign.served, Campaign.changed_key,
    *newcomer.SCENES,
)  # fmt: skip


def _files(store: Path) -> dict[str, tuple[int, int]]:
    """Files of weights, by their paths: when each was written, and its bytes on the disk, without its holes."""
    found = ((path, path.stat()) for path in store.rglob("*.safetensors"))
    return {str(path): (stat.st_mtime_ns, 512 * stat.st_blocks) for path, stat in found}


def _wheel(folder: Path) -> Path:
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(words, check=True)
    return next(folder.glob("splitinfer-*.whl"))


def _uv() -> str:
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return _UV.format(python=sys.executable, packages=packages, version=version)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--until", choices=[scene.__name__ for scene in SCENES], help="the last scene")


def campaign(report: Report, given: argparse.Namespace) -> None:
    if (reason := is_possible()) is not None:
        raise Missing(reason)
    played = dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="up-") as folder:
        Path(folder).chmod(0o755)
        with closing(Campaign(Path(folder), report)) as machines:
            report.begin()
            for scene in SCENES:
                report.say(f"{scene.__name__}: {' '.join((scene.__doc__ or '').split())}")
                before = report.seconds
                scene(machines)
                played[scene.__name__] = round(report.seconds - before, 1)
                if scene.__name__ == given.until or report.is_over:
                    break
    report.figures |= {"scenes": played, "scenes_left_out": len(SCENES) - len(played)}
