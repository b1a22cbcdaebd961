"""launchctl, systemctl, journalctl and loginctl as scripts that do what a test's folder says, and note every call.

Files in the folder: ``calls`` (what was called), ``loaded`` (the service is known), ``printed`` (what the manager says
of it once it is started), ``refuses`` (the start fails with this complaint and code 1), ``no-session``, ``lingers`` and
``busy`` (so many lines, so many more calls until the service before is gone, or a bootstrap succeeds).
"""

import os
from pathlib import Path

import pytest

from splitinfer.service.definition import Definition, ServicePlace

_LAUNCHCTL = r"""#!/bin/sh
cd "$STAND_INS" || exit 99
echo "launchctl $*" >>calls
fewer() { [ -s "$1" ] && { sed -i.old 1d "$1"; return 0; }; return 1; }
case "$1 $2" in
"print gui/501")
    [ ! -e no-session ] || { echo "Bad request: 125: Domain does not support specified action" >&2; exit 125; } ;;
print*)
    if [ -e leaving ] && ! fewer lingers; then rm -f loaded leaving; fi
    [ -e loaded ] || { echo "Could not find service \"${2##*/}\" in domain for user gui: 501" >&2; exit 113; }
    cat printed ;;
bootstrap*)
    if fewer busy; then echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; fi
    [ ! -e loaded ] || { echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; }
    [ ! -e refuses ] || { cat refuses >&2; exit 1; }
    cp "$3" loaded ;;
bootout*)
    [ -e loaded ] || { echo "Boot-out failed: 3: No such process" >&2; exit 3; }
    : >leaving ;;
esac
"""

_SYSTEMCTL = r"""#!/bin/sh
cd "$STAND_INS" || exit 99
echo "systemctl $*" >>calls
case $2 in
show-environment)
    [ ! -e no-session ] || { echo "Failed to connect to bus: No medium found" >&2; exit 1; } ;;
restart)
    [ ! -e refuses ] || { cat refuses >&2; exit 1; }
    : >loaded ;;
disable) rm -f loaded ;;
show) if [ -e loaded ]; then cat printed; else echo LoadState=not-found; fi ;;
esac
"""

_JOURNALCTL = (
    '#!/bin/sh\ncat "$STAND_INS/journal" 2>/dev/null || { echo "No journal files were found." >&2; exit 1; }\n'
)
_LOGINCTL = "#!/bin/sh\necho no\n"

LAUNCHD_RUNNING = """\
gui/501/io.splitinfer.worker = {
\tactive count = 1
\tstate = running

\targuments = {
\t\t/Users/me/.local/bin/splitinfer
\t\tworker
\t\tpid = 1
\t}

\truns = 1
\tpid = 4242
\tlast exit code = (never exited)

\tresource coalition = {
\t\tstate = active
\t\tactive count = 1
\t}

}
"""

LAUNCHD_FAILED = (
    LAUNCHD_RUNNING.replace("state = running", "state = spawn scheduled")
    .replace("\tpid = 4242\n", "")
    .replace("(never exited)", "1")
    .replace("runs = 1", "runs = 3")
)

SYSTEMD_RUNNING = """\
LoadState=loaded
ActiveState=active
MainPID=4242
NRestarts=0
Result=success
ExecMainCode=0
ExecMainStatus=0
"""

SYSTEMD_FAILED = """\
LoadState=loaded
ActiveState=activating
MainPID=0
NRestarts=1
Result=exit-code
ExecMainCode=1
ExecMainStatus=1
"""

WORDS = ("/Users/me/.local/bin/splitinfer", "worker", "--host", "0.0.0.0", "--port", "5577")
ASKED = Definition(WORDS, {"HF_HOME": "/Volumes/Models/hf"})


class StandIns:
    """The folder of one test, and the place of a user there."""

    def __init__(self, folder: Path, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "stand-ins"
        self.folder.mkdir()
        is_mac = platform == "darwin"
        programs = {"launchctl": _LAUNCHCTL} if is_mac else {"systemctl": _SYSTEMCTL, "journalctl": _JOURNALCTL}
        for name, text in {**programs, "loginctl": _LOGINCTL}.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self.say("printed", LAUNCHD_RUNNING if is_mac else SYSTEMD_RUNNING)
        monkeypatch.setenv("PATH", f"{self.folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
        monkeypatch.setenv("STAND_INS", str(self.folder))
        self.slept: list[float] = []
        self.place = ServicePlace(platform, folder / "home", 501, {"USER": "me"}, self.slept.append)

    def say(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def log(self, text: str) -> Path:
        """The worker has written this."""
        self.say("journal", text)
        file = self.place.home / "Library/Logs/splitinfer/worker.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def calls(self) -> list[str]:
        """What was called since the last time, without looking."""
        file = self.folder / "calls"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        looking = ("launchctl print", "systemctl --user show")
        return [call for call in found if not call.startswith(looking)]
