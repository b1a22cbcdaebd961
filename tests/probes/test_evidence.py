"""Commands that are absent, fail, or hang are answers too, and soon."""

import sys
import time

from splitinfer.probes.evidence import COMMANDS, Output, route_command, run_command, run_commands


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_what_a_command_prints():
    assert run_command(python("print('enabled')"), 20) == Output("enabled\n")


def test_what_it_prints_counts_although_it_fails():
    assert run_command(python("print('disabled'); raise SystemExit(1)"), 20) == Output("disabled\n")


def test_an_absent_command():
    assert run_command(("/nowhere/rdma_ctl", "status"), 20) == Output(None, "there is no rdma_ctl here")


def test_a_command_that_may_not_be_run(tmp_path):
    path = tmp_path / "ibv_devices"
    path.write_text("no program")
    assert "ermission denied" in run_command((str(path),), 20).why


def test_a_command_that_fails():
    output = run_command(python("import sys; sys.exit('No IB devices\\nfound')"), 20)
    assert output.text is None
    assert output.why.endswith("failed: No IB devices found")


def test_a_command_that_hangs_and_ignores_signals():
    began = time.monotonic()
    output = run_command(
        python("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"), 1.0
    )
    assert output.text is None
    assert "has not answered for 1 s" in output.why
    assert time.monotonic() - began < 5


def test_a_child_that_keeps_the_output_open_does_not_hold_it_up():
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)']); print('done')"
    )
    began = time.monotonic()
    assert run_command(python(code), 20) == Output("done\n")
    assert time.monotonic() - began < 4


def test_bytes_that_are_no_text():
    assert run_command(python("import sys; sys.stdout.buffer.write(b'\\xff\\xfeok')"), 20) == Output("\ufffd\ufffdok")


def test_all_at_once():
    slow = python("import time; time.sleep(1); print(1)")
    began = time.monotonic()
    assert set(run_commands(dict.fromkeys("abcdef", slow), 30).values()) == {Output("1\n")}
    assert time.monotonic() - began < 5


def test_a_system_without_commands_of_its_own():
    assert run_commands({}, 1) == {}
    assert set(COMMANDS["Linux"]) == {"nvidia"}


def test_the_way_to_an_address():
    assert route_command("Darwin", "10.0.0.2") == ("/sbin/route", "-n", "get", "10.0.0.2")
    assert route_command("Darwin", "fd00::2")[-2:] == ("-inet6", "fd00::2")
    assert route_command("Linux", "10.0.0.2") == ("ip", "-json", "route", "get", "10.0.0.2")
