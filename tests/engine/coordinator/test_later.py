"""Figures are read between calls that were put off, never in the middle of them."""

import threading

from splitinfer.engine.coordinator.later import Later


def test_a_reading_has_all_that_was_put_off():
    later, made = Later(), list[int]()
    for number in range(5):
        later.put(made.append, number)
    assert later.then(lambda: list(made)) == [0, 1, 2, 3, 4]


def test_nothing_is_counted_while_it_is_read():
    later, made = Later(), list[int]()
    other = threading.Thread(target=later.run)

    def read() -> list[int]:
        later.put(made.append, 1)
        other.start()
        other.join(0.05)  # for a call that must not be made
        return list(made)

    assert later.then(read) == []
    other.join()
    assert made == [1]
