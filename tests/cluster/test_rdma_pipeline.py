"""Real worker processes linked by rdma, over MLX's ring or emulated JACCL: what a person sees, and what happens when a
carrier dies."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from processes import are_gone, coordinator, until, worker

import splitinfer
from splitinfer.errors import LayoutError, WorkerUnreachable
from splitinfer.llm import LLM, Settings
from splitinfer.wire.messages import Progress
from transports.emulated_jaccl.device import REGIONS_OF_GROUP, Limits
from transports.emulated_jaccl.world import World
from transports.rdma.groups import kept_groups

PARAMS = splitinfer.SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.8, seed=4)
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
    """All processes below this one that a group lives in."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "transports.rdma.child" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


def test_a_killed_carrier_is_a_loss_from_which_the_pipeline_recovers(expected: list[int]) -> None:
    with LLM(layout(3, **RING)) as llm:
        assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
        for num_losses, is_own in enumerate([True, False], 1):
            before = _carriers_of_two_links()
            victim = next(one for one in before if (one.ppid() == psutil.Process().pid) == is_own)
            request = llm.submit(PROMPT, PARAMS)
            events = iter(request)
            for _ in range(5):
                next(events)
            victim.kill()
            assert request.result().token_ids == expected
            assert llm.stats()["rejoins"] == num_losses
            assert are_gone([victim])
        _carriers_of_two_links()
    until(lambda: not carriers(), "no carrier is left")


def _carriers_of_two_links() -> list[psutil.Process]:
    """Each link of hidden states has a process at both its ends; those of links that have ended are about to go."""
    until(lambda: len(carriers()) == 4, "four carriers")
    return carriers()


def test_a_killed_worker_takes_its_carriers_along(expected: list[int]) -> None:
    with LLM(layout(3, **RING)) as llm:
        before = _carriers_of_two_links()
        request = llm.submit(PROMPT, PARAMS)
        events = iter(request)
        next(events)
        victim = next(one for one in psutil.Process().children() if "--name" in one.cmdline())
        victim.kill()
        assert request.result().token_ids == expected
        until(lambda: are_gone(before), "all links are new ones")


def emulated_jaccl(folder: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits) -> World:
    """For this process and the workers that it starts."""
    world = World.make(folder / "jaccl", limits=limits)
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    return world


def test_a_carrier_killed_on_emulated_jaccl_is_a_loss_from_which_the_pipeline_recovers(
    expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's dies, so the reader's is killed within its receive; there are regions for a second group here."""
    world = emulated_jaccl(tmp_path, monkeypatch, Limits(regions=3 * REGIONS_OF_GROUP))
    with LLM(layout(2, transport="rdma", device=World.devices())) as llm:
        _lose_a_carrier(llm, expected)
        assert len(carriers()) == 2, "the new link is by rdma, too"
    kept_groups.end_all()
    until(lambda: not carriers(), "no carrier is left")
    assert world.usage("rdma_en0").num_left == 0
    assert world.usage("rdma_en0").num_groups == 2


def test_auto_goes_on_over_tcp_where_a_dead_carrier_has_used_up_its_device(
    expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = emulated_jaccl(tmp_path, monkeypatch, Limits())
    notes: list[str] = []

    def notice(_stage: str, progress: Progress) -> None:
        if progress.phase == "link":
            notes.append(progress.text)

    with LLM(layout(2, transport="auto", device=World.devices()), notice=notice) as llm:
        assert notes == []
        _lose_a_carrier(llm, expected)
        assert world.usage("rdma_en1").num_left == 1
        assert len(notes) == 1
        assert "[jaccl] Register memory region failed" in notes[0]
    kept_groups.end_all()
    until(lambda: not carriers(), "no carrier is left")


def _lose_a_carrier(llm: LLM, expected: list[int]) -> None:
    """Kill the writer of the only link during a generation."""
    (victim,) = [one for one in carriers() if one.ppid() == psutil.Process().pid]
    request = llm.submit(PROMPT, PARAMS)
    events = iter(request)
    for _ in range(5):
        next(events)
    victim.kill()
    assert request.result().token_ids == expected
    assert llm.stats()["rejoins"] == 1


def test_auto_takes_tcp_where_rdma_is_not_to_be_had_and_says_why_once(expected: list[int]) -> None:
    notes: list[tuple[str, str]] = []

    def notice(stage: str, progress: Progress) -> None:
        if progress.phase == "link":
            notes.append((stage, progress.text))

    with LLM(layout(3, transport="auto"), notice=notice) as llm:
        assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
    assert not carriers()
    # The coordinator's link to the first worker, and the one between the workers, which that reports.
    assert [stage for stage, _ in notes] == ["b", "c"]
    assert all(text.startswith("tcp in place of rdma: ") and "macOS 26.2" in text for _, text in notes)


def test_rdma_that_is_not_to_be_had_is_refused_with_its_reason() -> None:
    with pytest.raises(WorkerUnreachable, match=r"worker b .* cannot be reached by rdma: .*macOS 26\.2"):
        LLM(layout(2, transport="rdma"), settings=Settings(connect_timeout=5))


def test_the_command_line_shows_the_reason_and_answers(tmp_path: Path) -> None:
    with worker() as there:
        stages = [{"name": "a", "layers": 6}, {"name": "b", "layers": 6, "address": there.address, "transport": "auto"}]
        path = tmp_path / "layout.yaml"
        path.write_text(yaml.safe_dump({"model": "demo", "stages": stages}))
        with coordinator(path, "--prompt", PROMPT, "--max-tokens", "5") as running:
            assert running.wait(60) == 0
        assert running.err.count("link to stage b: tcp in place of rdma: ") == 1


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
