"""generation_config.json is advice: whatever is in it, a model opens."""

import logging
from pathlib import Path
from typing import Any

import pytest

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.demo import DEMO_MODELS
from splitinfer.models.caches.attention import from_config
from splitinfer.models.folder.checkpoint import GENERATION_CONFIG, Checkpoint, end_tokens, read_recommended
from splitinfer.models.load.trained import is_trained
from splitinfer.pictures.families import layers_at_once


def write(folder: Path, content: str | bytes) -> Path:
    (folder / GENERATION_CONFIG).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_what_a_file_says_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert read_recommended(tmp_path) == Recommended({}), "there is none"
    write(tmp_path, '{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    assert read_recommended(tmp_path) == Recommended({"temperature": 0.6, "top_k": 20})
    assert not caplog.records


@pytest.mark.parametrize("content", ["", "[1]", b"\xff\xfe{", "[" * 100_000, '{"temperature": ' + "9" * 5000 + "}"])
def test_a_file_that_is_none_is_one_warning(content: str | bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert read_recommended(write(tmp_path, content)) == Recommended({})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{GENERATION_CONFIG} is ignored: it " in caplog.text


def test_all_values_out_of_range_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    found = read_recommended(write(tmp_path, '{"temperature": NaN, "top_p": 7, "min_p": 0.1}'))
    assert found.values == {"min_p": 0.1}
    (record,) = caplog.records
    assert record.getMessage() == (
        f"ignored values in {tmp_path / GENERATION_CONFIG}: temperature must be from 0 to 100, not nan; "
        "top_p must be over 0 and at most 1, not 7.0"
    )


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ('{"eos_token_id": [5, 6]}', [5, 6]),
        ('{"eos_token_id": 0}', 0),
        ('{"eos_token_id": null}', 2),
        ('{"eos_token_id": "</s>"}', 2),
        ('{"eos_token_id": true}', 2),
        ("nonsense", 2),
    ],
)
def test_what_ends_an_answer(content: str, ids: int | list[int], tmp_path: Path):
    assert end_tokens(write(tmp_path, content), {"eos_token_id": 2}) == ids
    assert end_tokens(tmp_path / "gone", {}) is None


ODD = [None, "x", -1, 1.5, [], {}, True, [1, "x"], [None], {"a": 1}, 10**20]


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"text_config": {"eos_token_id": 7}}, 7),
        ({"text_config": {"eos_token_id": [1, 7]}}, [1, 7]),
        ({"eos_token_id": 2, "text_config": {"eos_token_id": 7}}, 2),
        ({"eos_token_id": [], "text_config": {"eos_token_id": 7}}, 7),
        ({"llm_config": {"eos_token_id": 7}}, 7),
        ({"language_config": {"eos_token_id": 7}}, 7),
        ({"thinker_config": {"text_config": {"eos_token_id": 7}}}, 7),
        *(({"eos_token_id": odd, "text_config": {"eos_token_id": 7}}, 7) for odd in ODD),
        *(({"eos_token_id": odd, "text_config": odd}, None) for odd in ODD),
    ],
)
def test_what_ends_an_answer_may_be_nested(config: dict[str, Any], ids: int | list[int] | None, tmp_path: Path):
    assert end_tokens(tmp_path, config) == ids


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_no_reader_of_a_configuration_trips_over_an_odd_value(odd: Any):
    keys = ("vocab_size", "max_position_embeddings", "num_attention_heads", "architectures", "eagle_config",
            "dflash_config", "hidden_size_per_layer_input", "num_hidden_layers")  # fmt: skip
    vision = {"deepstack_visual_indexes": odd}
    for config in ({**dict.fromkeys(keys, odd), "text_config": odd}, {"text_config": dict.fromkeys(keys, odd)}):
        checkpoint = Checkpoint(Path(), {**config, "vision_config": vision}, {})
        assert checkpoint.vocab_size in (None, 10**20)
        assert checkpoint.context_length in (2**20, 10**20)
        from_config(checkpoint.config, 2)
        assert not is_trained(checkpoint)
        assert layers_at_once(checkpoint.config) >= 0


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_the_demo_models_recommend_sampling(name: str):
    assert read_recommended(DEMO_MODELS[name]) == Recommended({"temperature": 0.7, "top_p": 0.95})
