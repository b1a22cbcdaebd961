"""A worker that gets another address in the middle of an answer."""

from dataclasses import replace

import pytest
from stages import here, layout, plain_greedy, prompt
from tiny import Folder

from splitinfer import SamplingParams
from splitinfer.config import Layout
from splitinfer.llm import LLM, Settings

KEY = "7" * 64


@pytest.mark.parametrize("by_key", [True, False])
def test_a_worker_that_moves(by_key: bool, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """One that was found by its key is followed, and the answer goes on. For one whose address was given, the error
    says where its key is now."""
    model, tokens, params = tiny_folder("llama"), prompt(20), SamplingParams(max_tokens=60, ignore_eos=True)
    with here() as first, here() as second:
        told = layout(model, [2, 2], [first.address])
        if by_key:
            told["stages"][1] = {"name": "s1", "layers": 2, "key": KEY}

        def find_stages(given: Layout, **_: object) -> Layout:
            """Without the key: these workers have none."""
            stages = [replace(stage, address=first.address, key=None) for stage in given.to_find]
            return replace(given, stages=(given.stages[0], *(stages or given.stages[1:])))

        monkeypatch.setattr("splitinfer.llm.llm.find_stages", find_stages)
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

        def find_stages(given: Layout, **_: object) -> Layout:
            stages = [replace(stage, address=there.address, key=None) for stage in given.to_find]
            return replace(given, stages=(given.stages[0], *(stages or given.stages[1:])))

        monkeypatch.setattr("splitinfer.llm.llm.find_stages", find_stages)
        with LLM(layout(model, [4], [])) as llm:
            told = layout(model, [2, 2], ["tcp://127.0.0.1:1"])
            told["stages"][1] = {"name": "s1", "layers": 2, "key": KEY}
            llm.recut(told)
            found = llm.generate([tokens], SamplingParams(max_tokens=5, ignore_eos=True))
            assert found[0].token_ids == plain_greedy(model, tokens, 5)
            assert llm._engine.pipeline._config.by_key == {"s1"}
