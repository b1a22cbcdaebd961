"""Products of weights with few rows: the same numbers, asked for the other way round."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import shard_linear

from splitinfer.models import blas as products
from splitinfer.models.blas import MAX_ROWS, transposed_product, use_transposed_products


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 24)
        self.layers = [nn.Linear(24, 40), nn.Linear(40, 24, bias=False)]
        self.small = nn.QuantizedLinear(64, 8)


def pair() -> tuple[Block, Block]:
    plain, turned = Block(), Block()
    turned.update(plain.parameters())
    use_transposed_products(turned, wanted=lambda: True)
    return plain, turned


@pytest.fixture
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as small as a test's are turned, too."""
    monkeypatch.setattr(products, "MIN_SIZE", 1)


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("shape", [(24,), (2, 3, 24), (MAX_ROWS, 24), (MAX_ROWS + 1, 24), (0, 24)])
def test_the_numbers_are_the_same_but_for_rounding(shape: tuple[int, ...]) -> None:
    plain, turned = pair()
    x = mx.random.normal(shape)
    for one, other in (
        (plain.layers[0](x), turned.layers[0](x)),
        (plain.layers[1](plain.layers[0](x)), turned.layers[1](plain.layers[0](x))),
        (plain.table.as_linear(x), turned.table.as_linear(x)),
    ):
        assert one.shape == other.shape
        assert mx.allclose(one, other, rtol=1e-5, atol=1e-5)
    ids = mx.array([[3, 30]])
    assert mx.array_equal(plain.table(ids), turned.table(ids)), "a table still looks up"


@pytest.mark.parametrize(
    ("rows", "dtype", "least", "is_turned"),
    [
        (1, mx.float32, 1, True), (MAX_ROWS, mx.float32, 1, True), (MAX_ROWS + 1, mx.float32, 1, False),
        (1, mx.bfloat16, 1, False), (1, mx.float32, 2**18, False),
    ],
)  # fmt: skip
def test_which_products_are_turned(
    rows: int, dtype: mx.Dtype, least: int, is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MIN_SIZE", least)
    seen: list[tuple[int, ...]] = []

    def noted(weight: mx.array, x: mx.array) -> mx.array:
        seen.append(x.shape)
        return transposed_product(weight, x)

    monkeypatch.setattr(products, "transposed_product", noted)
    _, turned = pair()
    turned.set_dtype(dtype)
    turned.layers[0](mx.zeros((rows, 24), dtype))
    assert bool(seen) == is_turned


@pytest.mark.usefixtures("_any_size")
def test_the_halves_of_two_machines_are_turned_too() -> None:
    x, group = mx.random.normal((3, 24)), mx.distributed.init()
    for sharding, bias in (("all-to-sharded", True), ("sharded-to-all", True), ("sharded-to-all", False)):
        plain = nn.Linear(24, 40, bias=bias)
        layer = shard_linear(plain, sharding, group=group)
        use_transposed_products(layer, wanted=lambda: True)
        assert type(layer).__module__ == products.__name__
        assert mx.allclose(layer(x), plain(x), rtol=1e-5, atol=1e-5)
