"""Endings that meet: the loop's own and the one of whoever closes it."""

import threading
import time

from splitinfer.config import Layout
from splitinfer.core.identity import Fingerprint
from splitinfer.engine.pipeline import Pipeline, PipelineOrder


class SlowToStop:
    """A local worker that takes a moment to end, as a frozen one does."""

    def __init__(self) -> None:
        self.num_stops = 0
        self.is_gone = False

    def stop(self) -> None:
        self.num_stops += 1
        time.sleep(0.1)
        self.is_gone = True


def test_two_threads_may_close_at_once() -> None:
    layout = Layout.from_dict({"stages": [{"name": "a", "layers": 1}]})
    order = PipelineOrder(layout, "demo", Fingerprint("c"), 1, 1, 1.0)
    pipeline = Pipeline(order, lambda _event: None, lambda _stage, _progress: None)
    workers = {name: SlowToStop() for name in "bc"}
    pipeline._locals.update(workers)  # type: ignore[arg-type]
    gone_when_done: list[bool] = []

    def close() -> None:
        pipeline.close("the end")
        gone_when_done.append(all(worker.is_gone for worker in workers.values()))

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(5)
    assert gone_when_done == [True, True], "nobody may leave before the workers have"
    assert [worker.num_stops for worker in workers.values()] == [1, 1]
