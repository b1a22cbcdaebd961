"""Workers beyond loopback, real processes, each with keys of its own: who is admitted, and what others get."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stages
from peers import Peer, hello
from processes import Running, RunningWorker, until, worker

import splitinfer
from splitinfer.demo import TARGET
from splitinfer.errors import PeerError, Refused
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM
from transports import LinkOptions, LinkRefused, Security, connect

PROMPT = "Once upon a time there was"
PARAMS = splitinfer.SamplingParams(max_tokens=12, ignore_eos=True)


@contextmanager
def beyond_loopback(folder: Path, name: str, *options: str) -> Iterator[RunningWorker]:
    """A worker on all interfaces, on a machine of its own as far as keys go."""
    with worker("--host", "0.0.0.0", *options, name=name, env={"XDG_CONFIG_HOME": str(folder / name)}) as running:
        yield running


def address(running: RunningWorker) -> str:
    return running.address.replace("0.0.0.0", "127.0.0.1")


def key(running: RunningWorker) -> str:
    """What a person would copy from the line it prints."""
    return running.sees(r"this worker's stage in the layout: \{.*key: ([0-9a-f]{64})\}")[1]


def keyring(folder: Path, name: str) -> Keyring:
    return Keyring(folder / name / "splitinfer")


def layout(*workers: RunningWorker, with_keys: bool = True) -> dict[str, object]:
    share = 12 // (len(workers) + 1)
    found: list[dict[str, object]] = [{"name": "a", "layers": share}]
    for i, one in enumerate(workers):
        found.append({"name": f"w{i}", "layers": share, "address": address(one)})
        if with_keys:
            found[-1]["key"] = key(one)
    return {"model": "demo", "stages": found}


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with stages.pipeline(TARGET, [12]) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids


def test_from_the_first_start_to_an_answer(tmp_path: Path, expected: list[int]) -> None:
    """As a person does it: start the worker, copy its line, be refused, run what the sentence says, go on."""
    with beyond_loopback(tmp_path, "mini") as mini:
        mini.sees("no coordinator is admitted yet: on the coordinator's machine, `splitinfer pair`")
        with pytest.raises(Refused, match=r"this machine there: splitinfer pair ([0-9a-f]{64})") as refused:
            LLM(layout(mini))
        mine = re.search(r"splitinfer pair ([0-9a-f]{64})", str(refused.value))
        assert mine is not None
        mini.sees(f"admit it with: splitinfer pair {mine[1]}")
        pairing = Running("pair", mine[1], "--name", "studio", env={"XDG_CONFIG_HOME": str(tmp_path / "mini")})
        assert pairing.wait(30) == 0
        with LLM(layout(mini)) as llm:
            assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
        assert [one.name for one in keyring(tmp_path, "mini").known()] == ["studio"]
        with pytest.raises(Refused, match="requires an encrypted link: give the key that it printed"):
            LLM(layout(mini, with_keys=False))
        Keyring().admit(key(mini), "mini")  # as `init` does
        with LLM(layout(mini, with_keys=False)) as llm:
            assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
    told = Running("pair")
    assert told.wait(30) == 0
    assert mine[1] in told.out


def test_a_worker_brings_hidden_states_and_nothing_else(tmp_path: Path, expected: list[int]) -> None:
    """The middle stage's key is told by the coordinator: it may bring hidden states, as long as that session lasts."""
    with beyond_loopback(tmp_path, "mini") as mini, beyond_loopback(tmp_path, "air") as air:
        for name in ("mini", "air"):
            keyring(tmp_path, name).admit(Keyring().own().public, "studio")
        both = layout(mini, air)
        middle = keyring(tmp_path, "mini").own()
        with LLM(both) as llm:
            assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
            link = connect(address(air), timeout=5, options=LinkOptions(security=Security(middle, key(air))))
            with Peer(address(air), link=link) as peer:
                answer = peer.say(hello(role="coordinator")).hear()
                assert "this key is not admitted here" in answer.reason
            assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
        with LLM(both) as llm:  # the workers are still there, and a second session is one more
            assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
        until(
            lambda: is_refused(address(air), LinkOptions(security=Security(middle, key(air)))), "it is expected no more"
        )


def is_refused(there: str, options: LinkOptions) -> bool:
    try:
        connect(there, timeout=5, options=options).close()
    except LinkRefused:
        return True
    return False


@pytest.mark.nightly
def test_insecure_is_possible_and_said(tmp_path: Path, expected: list[int]) -> None:
    with beyond_loopback(tmp_path, "mini", "--insecure") as mini:
        mini.sees("--insecure: any host that reaches tcp://.* can use this worker")
        with LLM(layout(mini, with_keys=False)) as llm:
            assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
        there = layout(mini, with_keys=False)
        there["stages"][1]["key"] = "ab" * 32  # type: ignore[index]
        with pytest.raises(PeerError, match="A worker with --insecure, or on its own machine only, has no key"):
            LLM(there)
