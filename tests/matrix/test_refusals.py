"""A model whose parts cannot run alone is refused, whatever it is called: toys of five dimensions."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from plans import cut_at

from splitinfer.errors import CannotCut, ModelError


class Block(nn.Module):
    """One layer: keeps the sum of all it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5, bias=False)

    def __call__(self, x: mx.array, cache: Any, extra: mx.array | None = None) -> mx.array:
        keys = self.mix(x)[:, None]
        keys, _ = cache.update_and_fetch(keys, keys)
        return x + keys.sum(axis=2) + (0 if extra is None else extra)


Walk = Callable[[list[Any], mx.array, list[Any]], mx.array]


class Toy(nn.Module):
    """Four layers, walked through in some way."""

    model_type = "toy"

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = [Block() for _ in range(4)]
        self._walk = walk

    @property
    def layers(self) -> list[Block]:
        return self.blocks

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.embed.as_linear(self._walk(self.blocks, self.embed(tokens), cache))


def straight(blocks: list[Any], x: mx.array, caches: list[Any]) -> mx.array:
    for block, cache in zip(blocks, caches, strict=True):
        x = block(x, cache)
    return x


def skipping_to_the_end(blocks: list[Any], x: mx.array, caches: list[Any]) -> mx.array:
    first = blocks[0](x, caches[0])
    return first + straight(blocks[1:], first, caches[1:])


def handing_on_the_first(blocks: list[Any], x: mx.array, caches: list[Any]) -> mx.array:
    first = x = blocks[0](x, caches[0])
    for block, cache in zip(blocks[1:], caches[1:], strict=True):
        x = block(x, cache, first)
    return x


def noting_all(blocks: list[Any], x: mx.array, caches: list[Any]) -> mx.array:
    """Each layer reads what all before it have noted: those run again behind a cut."""
    noted: list[mx.array] = []
    for block, cache in zip(blocks, caches, strict=True):
        noted.append(block.mix(x).mean(axis=-1, keepdims=True))
        x = block(x, cache, sum(noted, start=mx.zeros(())))
    return x


def backwards(blocks: list[Any], x: mx.array, caches: list[Any]) -> mx.array:
    return straight(blocks[::-1], x, caches)


def twice(blocks: list[Any], x: mx.array, caches: list[Any]) -> mx.array:
    return straight(blocks, straight(blocks, x, caches), caches)


def looking(blocks: list[Any], x: mx.array, caches: list[Any]) -> mx.array:
    for block, cache in zip(blocks, caches, strict=True):
        x = block(x, cache)
        x = x if x.sum().item() > 0 else -x
    return x


def summing_keys(blocks: list[Any], x: mx.array, caches: list[Any]) -> mx.array:
    x = straight(blocks, x, caches)
    return x + caches[0].keys_and_values()[0].sum(axis=2)


def _logits(walk: Walk, borders: list[int]) -> mx.array:
    mx.random.seed(3)
    stages = cut_at(Toy(walk), *borders)
    caches = [stage.make_caches() for stage in stages]
    logits = []
    for tokens in ([[1, 2, 3, 4]], [[5, 6]], [[7]]):
        y: mx.array | None = None
        for stage, held in zip(stages, caches, strict=True):
            y = stage(mx.array(tokens), held, y, len(tokens[0]))
        assert y is not None
        logits.append(y)
    return mx.concatenate(logits, axis=1)


@pytest.mark.parametrize("borders", [[2], [1, 2, 3]])
@pytest.mark.parametrize("walk", [straight, summing_keys, skipping_to_the_end, handing_on_the_first, noting_all])
def test_right(walk: Walk, borders: list[int]) -> None:
    assert mx.array_equal(_logits(walk, borders), _logits(walk, [])).item()


@pytest.mark.parametrize(
    ("walk", "reason"),
    [
        (twice, "runs its layers more than once"),
        (backwards, "not one after the other"),
        (looking, "looks at what it has computed"),
    ],
)
def test_refused_though_whole_it_runs(walk: Walk, reason: str) -> None:
    assert _logits(walk, []).shape == (1, 7, 11)
    with pytest.raises(CannotCut, match=reason):
        _logits(walk, [2])


def test_code_that_fails_is_one_sentence() -> None:
    def failing(*_given: Any) -> mx.array:
        raise AttributeError("no pixels")

    with pytest.raises(ModelError, match=r"toy cannot run on text tokens alone: .*AttributeError: no pixels"):
        _logits(failing, [2])
