"""Faults planted in what was measured: each is named, and decides the exit code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_probes import EXACT as EXACTLY
from made_up_probes import LINUX, MAC, ROUNDS, answer, link, memory, other

from splitinfer.errors import ConfigError
from splitinfer.probes.finding import Blame, Finding, Outcome, exit_code
from splitinfer.probes.links import judge_link
from splitinfer.probes.machine import judge_about, judge_quantised
from splitinfer.probes.memory import judge_memory
from splitinfer.probes.registry import worker_elsewhere
from splitinfer.probes.tokens import judge_answer

ROOT = Path(__file__).parents[2]
Judged = Callable[[], Finding | list[Finding]]


def named(judge: Judged) -> list[Finding]:
    found = judge()
    return found if isinstance(found, list) else [found]


def drafted(sent: int = 37) -> dict[str, Any]:
    return answer(drafts_sent=sent, drafts_accepted=18)


SOUND: dict[str, Judged] = {
    "a Mac": lambda: judge_about(MAC),
    "a Linux machine": lambda: judge_about(LINUX),
    "an answer": lambda: judge_answer("greedy", answer(), ROUNDS),
    "drafts": lambda: judge_answer("greedy, drafts", drafted(), ROUNDS),
    "kept KV": lambda: judge_answer("kept KV", answer(cached_tokens=295, kept_before=0), ROUNDS),
    "a near tie": lambda: judge_answer("sampled", other(0.12), ROUNDS),
    "KV in 8 bits": lambda: judge_quantised([0.004, 0.001]),
    "memory": lambda: judge_memory(memory()),
    "memory without Metal": lambda: judge_memory(memory(wired=None)),
    "a link": lambda: judge_link(link()),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_passes(name: str):
    found = named(SOUND[name])
    assert exit_code(found) == 0
    assert {each.outcome for each in found} <= {Outcome.PASSED, Outcome.NOT_AVAILABLE}
    assert all(each.sentence for each in found)


STOP, SEND = "do not trust answers", "send in the file"
USED = memory()["used"]
PLANTED: dict[str, tuple[Judged, Blame, str, str]] = {
    "a wrong token": (
        lambda: judge_answer("greedy", other(3.1), ROUNDS), Blame.TOKENS,
        "token 5 of 32 is 3.1 logits below mlx-lm's choice", STOP,
    ),
    "a tie where arithmetic is exact": (
        lambda: judge_answer("greedy", other(1e-7), EXACTLY), Blame.TOKENS, "token 5", STOP,
    ),
    "a missing token": (
        lambda: judge_answer("greedy", answer(gaps=[0.0] * 4), ROUNDS), Blame.TOKENS,
        "token 5 of 32 never came", STOP,
    ),
    "no drafts": (lambda: judge_answer("", drafted(0), ROUNDS), Blame.DEVICE, "no draft was sent", SEND),
    "another form": (
        lambda: judge_answer("a form", answer(has_form=False), ROUNDS), Blame.TOKENS, "has not the form", STOP,
    ),
    "nobody was lost": (lambda: judge_answer("", answer(killed=0), ROUNDS), Blame.TRANSPORT, "no worker's", SEND),
    "lost KV": (
        lambda: judge_answer("", answer(kept_before=0), ROUNDS), Blame.MEMORY, "0 of 295 tokens of KV", "disk",
    ),
    "KV of the last tokens is lost": (
        lambda: judge_answer("", answer(cached_tokens=256, kept_before=0), ROUNDS), Blame.MEMORY, "256 of 295", "disk",
    ),
    "a wrong kernel": (lambda: judge_quantised([0.0, 0.5]), Blame.DEVICE, "off by 0.5", STOP),
    "no numbers": (lambda: judge_quantised([0.0, float("nan"), 0.0]), Blame.DEVICE, "off by nan", STOP),
    "a Mac's processor": (
        lambda: judge_about({**MAC, "gpu": False}), Blame.DEVICE, "not on this Mac's GPU", "not under Rosetta",
    ),
    "low memory": (
        lambda: judge_about({**MAC, "free_bytes": 1.2e9}), Blame.MEMORY, "only 1.2 GB of 128 GB are free",
        "fewer layers",
    ),
    "arrays leak": (lambda: judge_memory(memory(used={**USED, "active": 40_000_000})), Blame.MEMORY, "grows", SEND),
    "nothing is wired": (
        lambda: judge_memory(memory(wired={"limit": 0, "recommended": 96e9})), Blame.MEMORY, "0 GB wired and not 96",
        SEND,
    ),
    "a worker that refuses": (
        lambda: judge_link(link("w refuses: run there: splitinfer pair abc")), Blame.WORKER, "splitinfer pair",
        "what the sentence says",
    ),
    "long latency": (
        lambda: judge_link(link(latency_p50=6e-3, latency_p99=8e-3)), Blame.SPEED, "6 ms one way",
        "Thunderbolt or Ethernet",
    ),
    "a slow way up": (lambda: judge_link(link(up=45e6)), Blame.SPEED, "45 MB/s", "Thunderbolt or Ethernet"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str):
    judge, fault, words, remedy = PLANTED[name]
    (found,) = (each for each in named(judge) if each.outcome is Outcome.FAILED)
    assert found.fault is fault
    assert words in found.sentence
    assert remedy in found.remedy


# -- exit codes, probes, addresses -------------------------------------------------------------------------------------


def test_the_table_of_exit_codes_has_all():
    page = (ROOT / "docs" / "start" / "check.md").read_text()
    assert [fault.name for fault in Blame if fault and f"| {int(fault)} |" not in page] == []


@pytest.mark.parametrize(("text", "key"), [("mini:99999", None), ("", None), ("mini", "12")])
def test_a_worker_elsewhere_is_named_as_in_a_layout(text: str, key: str | None):
    assert worker_elsewhere("mini", "ab" * 32) == {"address": "tcp://mini:5577", "key": "ab" * 32}
    with pytest.raises(ConfigError, match="--worker"):
        worker_elsewhere(text, key)
