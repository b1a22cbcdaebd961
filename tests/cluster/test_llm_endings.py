"""What a program that uses ``LLM`` sees when a worker dies, hangs or does not start; and that nothing stays behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from stages import pipeline

import splitinfer
from splitinfer.demo import TARGET
from splitinfer.engine.fleet.local_workers import LocalWorker
from splitinfer.engine.loop import loop
from splitinfer.errors import SplitinferError, WorkerUnreachable
from splitinfer.llm import LLM, Settings
from splitinfer.wire.messages import Progress

LAYOUT = {"model": "demo", "stages": [{"name": "a", "layers": 6}, {"name": "b", "layers": 6, "address": "local"}]}
LONG = splitinfer.SamplingParams(max_tokens=3000, ignore_eos=True)


def test_a_worker_dies_under_requests():
    with LLM(LAYOUT, settings=Settings(rejoin_timeout=0.0)) as llm:
        reader, waiting = llm.submit("Once upon a time", LONG), llm.submit([5, 6, 7], LONG)
        events = iter(reader)
        for _ in range(5):
            next(events)
        (child,) = psutil.Process().children()
        child.kill()
        for request in (reader, waiting):
            output = request.result()
            assert output.finish_reason == "error"
            assert output.error is not None
            assert "worker b" in output.error
        assert len(reader.output.token_ids) >= 5
        assert len(reader.output.token_times) == len(reader.output.token_ids)
        assert reader.output.text
        assert reader.result() is reader.output, "asked again, the same"
        with pytest.raises(SplitinferError, match="worker b"):
            llm.submit("again")
        with pytest.raises(SplitinferError, match="worker b"):
            llm.generate(["again", "and again"])
        llm.forget("nobody")
        reader.abort()
        llm.stats()


HANGS_ONCE = """\
import os
import threading
from pathlib import Path
from splitinfer.engine.device.device import Device

launch, launches = Device.launch, iter(range(12))

def hang(self, *given):
    if next(launches, None) is None and not Path(HUNG).exists():
        Path(HUNG).touch()
        threading.Event().wait()
    return launch(self, *given)

Device.launch = hang
"""


def test_a_local_worker_whose_engine_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its heartbeats go on. Python runs ``sitecustomize`` in each process that begins."""
    hung = tmp_path / "hung"
    (tmp_path / "sitecustomize.py").write_text(HANGS_ONCE.replace("HUNG", repr(str(hung))))
    monkeypatch.setattr(loop, "limit_of", lambda _predicted: 2.0)
    params = splitinfer.SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=3)
    with pipeline(TARGET, [12]) as llm:
        undisturbed = llm.generate("Once upon a time", params)[0].text
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with LLM(LAYOUT) as llm:
        (first,) = psutil.Process().children()
        assert llm.generate("Once upon a time", params)[0].text == undisturbed
        assert hung.exists()
        assert llm.stats()["losses"] == {"b": 1}
        assert not first.is_running(), "the one that hung was ended"


def test_a_program_that_does_not_close_it_ends_well():
    """With its code, and with its local worker."""
    program = f"""
from splitinfer import LLM, SamplingParams
llm = LLM({LAYOUT})
print(llm.generate("Once", SamplingParams(max_tokens=4, ignore_eos=True))[0].finish_reason)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "length\n", "")


def test_an_error_while_loading_leaves_nothing_behind():
    """``left_over`` looks for threads and processes."""

    def interrupt(_stage: str, _progress: Progress) -> None:
        raise RuntimeError("the caller's own mistake")

    with pytest.raises(SplitinferError, match="the caller's own mistake"):
        LLM(LAYOUT, notice=interrupt)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("echo 'no such thing' >&2; exit 3", "no such thing"),
        ("exit 3", "exit code 3"),
        ("exec sleep 100", r"nothing received for 0\.5 s"),
        ("printf '{'; exec sleep 100", r"no whole line received for 0\.5 s"),
        ("exec cat /dev/zero", "it printed no address"),
    ],
)
def test_a_local_worker_that_does_not_start(
    does: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    if "sleep" in does:
        monkeypatch.setattr("splitinfer.engine.fleet.local_workers.START_TIMEOUT", 0.5)
    silent = LocalWorker("b")
    with pytest.raises(WorkerUnreachable, match=f"the local worker b did not start: {reason}"):
        silent.address()
    silent.stop()
