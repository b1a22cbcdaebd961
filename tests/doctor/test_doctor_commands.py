"""Commands that are absent, fail, or hang are answers too, and soon."""

import sys
import time

from splitinfer.doctor.commands import Said, ask, ask_all


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_what_a_command_prints():
    assert ask(python("print('enabled')"), 20) == Said("enabled\n")


def test_what_it_prints_counts_although_it_fails():
    assert ask(python("print('disabled'); raise SystemExit(1)"), 20) == Said("disabled\n")


def test_an_absent_command():
    assert ask(("/nowhere/rdma_ctl", "status"), 20) == Said(None, "there is no rdma_ctl here")


def test_a_command_that_may_not_be_run(tmp_path):
    path = tmp_path / "ibv_devices"
    path.write_text("no program")
    assert "ermission denied" in ask((str(path),), 20).why


def test_a_command_that_fails():
    said = ask(python("import sys; sys.exit('No IB devices\\nfound')"), 20)
    assert said.text is None
    assert said.why.endswith("failed: No IB devices found")


def test_a_command_that_hangs_and_ignores_signals():
    began = time.monotonic()
    said = ask(python("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"), 1.0)
    assert said.text is None
    assert "has not answered for 1 s" in said.why
    assert time.monotonic() - began < 5


def test_a_child_that_keeps_the_output_open_does_not_hold_it_up():
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)']); print('done')"
    )
    began = time.monotonic()
    assert ask(python(code), 20) == Said("done\n")
    assert time.monotonic() - began < 4


def test_bytes_that_are_no_text():
    assert ask(python("import sys; sys.stdout.buffer.write(b'\\xff\\xfeok')"), 20) == Said("\ufffd\ufffdok")


def test_all_at_once():
    slow = python("import time; time.sleep(1); print(1)")
    began = time.monotonic()
    assert set(ask_all(dict.fromkeys("abcdef", slow), 30).values()) == {Said("1\n")}
    assert time.monotonic() - began < 5
