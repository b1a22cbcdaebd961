"""Both ends of a link saying goodbye at the same time: neither waits for words that were never sent."""

import threading
import time

import transports
from transports.base import FLUSH_SECONDS


def test_both_close_at_once():
    took: list[float] = []

    def close(link: transports.Link, at_once: threading.Barrier) -> None:
        at_once.wait(5)
        began = time.monotonic()
        link.close("done")
        took.append(time.monotonic() - began)

    with transports.listen("tcp://127.0.0.1:0") as listener:
        for _ in range(60):
            ours = transports.connect(listener.address, timeout=5)
            theirs = listener.accept(5)
            at_once = threading.Barrier(2)
            threads = [threading.Thread(target=close, args=(link, at_once)) for link in (ours, theirs)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(5)
    assert len(took) == 120
    slow = 0.9 * FLUSH_SECONDS  # what waits for words that never come takes all of it
    assert max(took) < slow, f"{sum(t > slow for t in took)} of {len(took)} goodbyes were slow"
