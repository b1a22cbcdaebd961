"""Commands that are absent, fail, or hang are answers too, and soon."""

import sys
from pathlib import Path

import pytest

from splitinfer.probes.evidence import Printed, run_command, run_commands

LATER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('done')"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print('enabled')", Printed("enabled\n")),
        ("print('disabled'); raise SystemExit(1)", Printed("disabled\n")),  # it counts although the command fails
        (LATER, Printed("done\n")),  # a child that keeps the output open does not hold it up
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfeok')", Printed("\ufffd\ufffdok")),
    ],
)
def test_what_a_command_prints(code: str, output: Printed):
    assert run_command((sys.executable, "-c", code), 50) == output


def test_why_there_is_no_output(tmp_path: Path):
    (tmp_path / "ibv_devices").write_text("no program")
    python, hangs = sys.executable, "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    for command, seconds, words in (
        (("/nowhere/rdma_ctl", "status"), 20, "there is no rdma_ctl here"),
        ((str(tmp_path / "ibv_devices"),), 20, "ermission denied"),
        ((python, "-c", "import sys; sys.exit('No IB devices\\nfound')"), 20, "failed: No IB devices found"),
        ((python, "-c", hangs), 1.0, "has not answered for 1 s"),
    ):
        output = run_command(command, seconds)
        assert output.text is None
        assert words in output.why


def test_all_at_once(tmp_path: Path):
    """Each of two commands waits for the other."""
    code = "import sys, time\nfrom pathlib import Path\nown, other = map(Path, sys.argv[1:])\nown.touch()\n"
    code += "while not other.exists(): time.sleep(0.01)\nprint(1)"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    both = {name: (sys.executable, "-S", "-c", code, *paths) for name, paths in (("a", (a, b)), ("b", (b, a)))}
    assert run_commands(both, 50) == {"a": Printed("1\n"), "b": Printed("1\n")}
