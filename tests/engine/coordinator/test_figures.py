"""Figures are read between events that were told, never in the middle of them."""

import threading
import time

from splitinfer.engine.coordinator.figures import Figures


def test_a_reading_has_all_that_was_told() -> None:
    figures, counted = Figures(["a"], time.monotonic()), list[int]()
    figures.events.extend(lambda number=number: counted.append(number) for number in range(5))
    assert figures._after_counting(lambda: list(counted)) == [0, 1, 2, 3, 4]


def test_nothing_is_counted_while_it_is_read() -> None:
    figures, counted = Figures(["a"], time.monotonic()), list[int]()
    other = threading.Thread(target=figures.count)

    def read() -> list[int]:
        figures.events.append(lambda: counted.append(1))
        other.start()
        other.join(0.05)  # for an event that must not be counted
        return list(counted)

    assert figures._after_counting(read) == []
    other.join()
    assert counted == [1]
