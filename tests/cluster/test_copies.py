"""Real processes: weights go from one machine's worker to another's store, and from there to a worker that has none."""

from pathlib import Path

import pytest
import stages
import tiny
from processes import Running, worker, write_layout

from splitinfer.keyring import Keyring
from splitinfer.llm import LLM
from splitinfer.weights.models import ModelStore, default_folder

NUM_LAYERS = 4


def said(*arguments: str) -> str:
    """What a command prints."""
    with Running("models", *arguments) as running:
        assert running.wait(60) == 0, running.err
        return running.out


@pytest.mark.nightly
def test_weights_travel_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From a worker that holds the model to this machine's store, by `models pull`; from this machine, as a
    coordinator, over an encrypted link to a worker on a machine that has nothing of it and no internet."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, prompt = tiny.save(tmp_path / "model", "llama"), stages.prompt(9)
    wanted = stages.plain_greedy(folder, prompt, 6)
    with worker() as first, LLM(write_layout(tmp_path, [first.address], str(folder), layers=NUM_LAYERS)):
        assert "(all)" in said("pull", str(folder), "--from", first.address)
    (mine,) = ModelStore(default_folder()).models()
    name = mine.digest[:12]  # in the store alone: the other machine has no folder of this name

    there, theirs = Keyring(tmp_path / "keys" / "splitinfer"), tmp_path / "theirs"
    there.admit(Keyring().own().public, "studio")
    env = {"XDG_CONFIG_HOME": str(tmp_path / "keys"), "XDG_DATA_HOME": str(tmp_path / "none")}
    with worker("--host", "0.0.0.0", "--models-dir", str(theirs), env=env) as second:
        address = second.address.replace("0.0.0.0", "127.0.0.1")
        two = [{"name": "a", "layers": 2}, {"name": "b", "layers": 2, "address": address, "key": there.own().public}]
        with LLM({"model": name, "stages": two}) as llm:
            assert stages.tokens_of(llm, prompt, max_tokens=6) == wanted
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "stranger"))
        with pytest.raises(AssertionError, match="cannot be asked for weights"):  # the door admits this machine's key
            said("pull", name, "--from", address, "--key", there.own().public, "--connect-timeout", "3")

    listed = said("ls", "--models-dir", str(theirs))
    assert "2-3 and others" in listed
    assert name in listed
    assert "freed" in said("rm", name, "--models-dir", str(theirs))
    assert ModelStore(theirs).models() == []
