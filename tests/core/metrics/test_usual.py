"""What something usually takes."""

from splitinfer.core.metrics.usual import Usual


def test_one_in_three_does_not_change_it_and_a_lasting_change_does() -> None:
    usual = Usual()
    assert usual.seconds == 0.0
    for number in range(30):
        usual.took(50.0 if number % 3 == 0 else 1.0)
    assert usual.seconds == 1.0
    for _ in range(8):
        usual.took(3.0)
    assert usual.seconds == 3.0
