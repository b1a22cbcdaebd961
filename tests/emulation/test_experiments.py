"""The programs that measure for experiments run, and print their figures."""

import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from splitinfer.llm import LLM
from splitinfer.machine.selection import VARIABLE
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

FOLDER = Path(__file__).parents[2] / "scripts" / "experiments"
ROWS = "{layers: 2, rows_ms: {1: 12, 8: 12.5, 512: 60}, buffers: 20}"
SHORT = {"_WARM": 3, "_COUNTED": 8, "_LONG_CHUNKS": 2, "_AFTER": 4, "_BEFORE": 6}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Loads a program by its name."""
    monkeypatch.setenv(VARIABLE, "")  # what a program sets ends with the test
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        spec = util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    file = tmp_path / "machine.yaml"
    file.write_text(f"stages:\n  - {ROWS}\n  - {ROWS}\nlaunches_ahead: true\n")
    return file


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_what_loops_leave_of_a_device(
    program: Callable[[str], ModuleType], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = program("device")
    for name, value in SHORT.items():
        monkeypatch.setattr(device, name, value)
    found = device.measure(machine, 1, device.CASES, 1)
    assert 0 < found["groups"][0]["share"] < 1.1
    assert found["one_stream"][0]["seconds_a_token"] > 0.024
    assert found["late_steps"]["steps"] > 20
    assert found["measured_on"]["device"] == "emulated accelerator"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_what_drafts_are_worth(program: Callable[[str], ModuleType], machine: Path, tmp_path: Path) -> None:
    given = Namespace(machine=machine, layout=None, streams=[1, 2], acceptance=[0.9], trials=1, tokens=40)
    one, two = program("drafts").measure(given, tmp_path)["cases"]
    assert one["same_tokens"]
    assert two["same_tokens"]
    assert one["to_none"] > 1.2
    assert set(two["tokens_per_second"]) > {"none, groups 1", "none, groups 2", "4 drafts", "live"}


@pytest.mark.nightly
def test_requests_to_a_server(program: Callable[[str], ModuleType]) -> None:
    sizes = {"requests": 6, "tokens": 8, "prompt": 10, "long": 3, "long_prompt": 200}
    given = Namespace(model="demo", key="", rate=20.0, objective=10.0, seed=1, **sizes)
    with LLM("demo.yaml") as llm, closing(Server(Service(llm, "demo"), Listen(port=0))) as server:
        given.url = f"http://127.0.0.1:{server.port}/v1"
        found = program("serving").measure(given)
    assert found["failed"] == []
    assert found["within"] == 1
    assert found["ttft"]["p50"] > 0 < found["ttft_of_long_prompts"]["p50"]
