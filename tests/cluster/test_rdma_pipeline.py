"""Real worker processes linked by rdma, over MLX's ring or emulated JACCL: what a person sees, and what happens when a
carrier dies."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from jaccl import carriers_of
from processes import are_gone, coordinator, until

import splitinfer
from splitinfer.errors import LayoutError, WorkerUnreachable
from splitinfer.llm import LLM, Settings
from splitinfer.wire.messages import Progress
from tests.emulation.jaccl.device import Limits
from tests.emulation.jaccl.world import World

PARAMS = splitinfer.SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=4)
PROMPT = "Once upon a time"
RING = {"transport": "rdma", "backend": "ring"}


def layout(num_stages: int, **stage: Any) -> dict[str, Any]:
    share = 12 // num_stages
    stages = [{"name": "a", "layers": share}]
    stages += [{"name": "bc"[i], "layers": share, "address": "local", **stage} for i in range(num_stages - 1)]
    return {"model": "demo", "stages": stages}


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with LLM(layout(1)) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids


def carriers() -> list[psutil.Process]:
    return carriers_of(psutil.Process().pid)


def lose(victim: psutil.Process, llm: LLM, expected: list[int]) -> None:
    """Kill a process during a generation."""
    rejoins, request = llm.stats()["rejoins"], llm.submit(PROMPT, PARAMS)
    events = iter(request)
    for _ in range(5):
        next(events)
    victim.kill()
    assert request.result().token_ids == expected
    assert llm.stats()["rejoins"] == rejoins + 1
    until(lambda: are_gone([victim]), "it is gone")


def test_a_killed_carrier_is_a_loss_from_which_the_pipeline_recovers(expected: list[int]) -> None:
    with LLM(layout(2, **RING)) as llm:
        assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
        lose(next(one for one in carriers() if one.ppid() == psutil.Process().pid), llm, expected)
        until(lambda: len(carriers()) == 2, "the new link is by rdma, too")
    until(lambda: not carriers(), "no carrier is left")


@pytest.mark.nightly
def test_a_device_without_room_for_another_group_goes_on_over_tcp(
    expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated JACCL, whose carrier is killed; with room the link comes back by rdma (campaign ``deaths``)."""
    world = World.make(tmp_path / "jaccl", limits=Limits())
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    notes: list[tuple[str, str]] = []
    with LLM(layout(2, transport="auto", device=World.devices()), notice=_links_to(notes)) as llm:
        assert notes == []
        lose(next(one for one in carriers() if one.ppid() == psutil.Process().pid), llm, expected)
        ((_, note),) = notes
        assert "[jaccl] Register memory region failed" in note
    until(lambda: not carriers(), "no carrier is left")


def _links_to(notes: list[tuple[str, str]]) -> Any:
    """What is said of links goes there."""

    def notice(stage: str, progress: Progress) -> None:
        if progress.phase == "link":
            notes.append((stage, progress.text))

    return notice


@pytest.mark.nightly
def test_auto_takes_tcp_where_rdma_is_not_to_be_had_and_says_why_once(expected: list[int], tmp_path: Path) -> None:
    notes: list[tuple[str, str]] = []
    with LLM(layout(3, transport="auto"), notice=_links_to(notes)) as llm:
        assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
    assert not carriers()
    # The coordinator's link to the first worker, and the one between the workers, which that reports.
    assert [stage for stage, _ in notes] == ["b", "c"]
    assert all(text.startswith("tcp in place of rdma: ") and "macOS 26.2" in text for _, text in notes)
    path = tmp_path / "layout.yaml"
    path.write_text(yaml.safe_dump(layout(2, transport="auto")))
    with coordinator(path, "--prompt", PROMPT, "--max-tokens", "5") as running:
        assert running.wait(60) == 0
    assert running.err.count("link to stage b: tcp in place of rdma: ") == 1


def test_rdma_that_is_not_to_be_had_is_refused_with_its_reason() -> None:
    with pytest.raises(WorkerUnreachable, match=r"worker b .* cannot be reached by rdma: .*macOS 26\.2"):
        LLM(layout(2, transport="rdma"), settings=Settings(connect_timeout=5))


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ({"transport": "infiniband"}, "has the transport 'infiniband', which is unknown; known: tcp, rdma, auto"),
        ({"transport": "rdma", "backend": "mpi"}, "has the backend 'mpi', which is unknown; known: jaccl, ring"),
        ({"backend": "ring"}, "has a backend or a device, which only transport rdma or auto uses"),
        ({"transport": "rdma", "device": "a b"}, "has the device 'a b'"),
        ({"transport": "rdma", "backend": "ring", "device": "en5"}, "has the device 'en5'"),
        ({"transport": "rdma", "address": "inproc://x"}, "has a transport; only the links to a worker at tcp"),
    ],
)
def test_layouts_that_are_refused(stage: dict[str, str], reason: str) -> None:
    with pytest.raises(LayoutError, match=f"stage 'b' of layout .*{reason}"):
        splitinfer.Layout.from_dict(layout(2, **stage))
