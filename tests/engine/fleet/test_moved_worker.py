"""A worker that gets another address in the middle of an answer, or has its coordinator's key."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from stages import here, keyed_worker, layout, plain_greedy, prompt, tokens_of
from tiny import Folder

from splitinfer import SamplingParams
from splitinfer.config import Layout
from splitinfer.engine.worker import handshake
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM, Settings

KEY = "7" * 64


def finding(address: str) -> Callable[..., Layout]:
    """Finds stages there, without the key: these workers have none."""

    def find_stages(given: Layout, **_: object) -> Layout:
        stages = [replace(stage, address=address, key=None) for stage in given.to_find]
        return replace(given, stages=(given.stages[0], *(stages or given.stages[1:])))

    return find_stages


@pytest.mark.parametrize("by_key", [True, False])
def test_a_worker_that_moves(by_key: bool, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """One that was found by its key is followed, and the answer goes on. For one whose address was given, the error
    says where its key is now."""
    model, tokens, params = tiny_folder("llama"), prompt(20), SamplingParams(max_tokens=60, ignore_eos=True)
    with here() as first, here() as second:
        told = layout(model, [2, 2], [first.address])
        if by_key:
            told["stages"][1] = {"name": "s1", "layers": 2, "key": KEY}

        monkeypatch.setattr("splitinfer.llm.llm.find_stages", finding(first.address))
        monkeypatch.setattr("splitinfer.llm.setup.find_again", lambda stage: second.address if moved else None)
        moved = False
        with LLM(told, settings=Settings(rejoin_timeout=30.0 if by_key else 3.0)) as llm:
            request = llm.submit(tokens, params)
            events = iter(request)
            next(events)
            moved = True
            first.stop()
            first.cables.close()
            output = request.result()
            if by_key:
                assert output.token_ids == plain_greedy(model, tokens, 60)
            else:
                assert f"Its key is announced at {second.address} now: give that address" in str(output.error)


def test_another_cut_finds_its_workers_by_their_keys(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """And follows them, like those of the first cut."""
    model, tokens = tiny_folder("llama"), prompt(20)
    with here() as there:
        monkeypatch.setattr("splitinfer.llm.llm.find_stages", finding(there.address))
        with LLM(layout(model, [4], [])) as llm:
            told = layout(model, [2, 2], ["tcp://127.0.0.1:1"])
            told["stages"][1] = {"name": "s1", "layers": 2, "key": KEY}
            llm.recut(told)
            found = llm.generate([tokens], SamplingParams(max_tokens=5, ignore_eos=True))
            assert found[0].token_ids == plain_greedy(model, tokens, 5)
            assert llm._engine.pipeline._config.by_key == {"s1"}


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_a_copied_key_is_told(
    is_elsewhere: bool,
    tiny_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if is_elsewhere:
        monkeypatch.setattr(handshake, "is_loopback", lambda _host: False)
        monkeypatch.setattr(handshake, "own_addresses", frozenset)
    keys, caplog.handler.level = Keyring(), logging.WARNING
    keys.admit(keys.own().public, "studio")
    with keyed_worker(keys, AccessControl(keys)) as address:
        told = layout(tiny_folder("llama"), [2, 2], [address])
        told["stages"][1]["key"] = keys.own().public
        with LLM(told, settings=Settings()) as llm:
            assert len(tokens_of(llm, prompt(9), max_tokens=2)) == 2
    assert ("has the same key as this machine, so the two cannot be told apart" in caplog.text) == is_elsewhere
