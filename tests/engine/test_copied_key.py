"""A worker whose coordinator has its key, and is another machine, says so."""

import logging

import pytest
from stages import keyed_worker, layout, prompt, tokens_of
from tiny import Folder

from splitinfer.engine.worker import handshake
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM, Settings


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
