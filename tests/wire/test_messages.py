"""Orders that contradict themselves do not exist; versions say in which they differ."""

import pytest

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.wire.messages import Load, Versions

HERE = Versions(1, "0.1.0", "0.32.4", "0.32.2")


def order(stage: int, *bounds: int) -> Load:
    return Load("m", "auto", stage, bounds, Fingerprint("c"), 100, 10, b"", "exact", False)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (Versions(1, "0.1.0", "0.32.4", "0.32.2"), None),
        (Versions(2, "0.1.0", "0.32.4", "0.32.2"), "protocol 1 here, protocol 2 there"),
        (Versions(1, "0.2.0", "0.32.4", "0.32.2"), "splitinfer 0.1.0 here, splitinfer 0.2.0 there"),
        (Versions(1, "0.1.0", "0.33.0", "0.32.2"), "mlx 0.32.4 here, mlx 0.33.0 there"),
        (Versions(1, "0.1.0", "0.32.4", "0.40"), "mlx-lm 0.32.2 here, mlx-lm 0.40 there"),
        (Versions(2, "0.2.0", "0", "0"), "protocol 1 here, protocol 2 there"),
    ],
)
def test_versions_name_their_first_difference(there: Versions, words: str | None):
    assert HERE.difference(there) == words


def test_the_cuts_of_an_order():
    orders = [order(stage, 0, 5, 7, 12) for stage in range(3)]
    assert [(o.start, o.end, o.is_last) for o in orders] == [(0, 5, False), (5, 7, False), (7, 12, True)]
    assert (order(0, 0, 12).start, order(0, 0, 12).end, order(0, 0, 12).is_last) == (0, 12, True)


@pytest.mark.parametrize(
    ("stage", "bounds"),
    [(0, ()), (0, (0,)), (0, (1, 5)), (0, (0, 0)), (0, (0, 5, 5)), (0, (0, 5, 3)), (-1, (0, 5)), (1, (0, 5))],
)
def test_an_order_owns_every_layer_once(stage: int, bounds: tuple[int, ...]):
    with pytest.raises(ValueError, match=rf"stage {stage} of cuts .* does not own every layer once"):
        order(stage, *bounds)
