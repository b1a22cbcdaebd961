"""A dozen faults where `mutants.py` cannot reach: in loops of the engine, and in links. Each has a test that finds it.

    python -m tests.planted

A fault is one method that does something else. The test has to pass without it and to fail with it.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.mutants import QUIETLY, in_processes

Method = Callable[..., Any]
END_SECONDS = 240.0


def nothing(_method: Method) -> Method:
    return lambda *_args, **_options: None


def always(value: object) -> Callable[[Method], Method]:
    return lambda _method: lambda *_args, **_options: value


def every_second(method: Method) -> Method:
    calls = iter(range(sys.maxsize))
    return lambda *args, **options: method(*args, **options) if next(calls) % 2 == 0 else None


def of_one_group(method: Method) -> Method:
    return lambda files, _group, name: method(files, "any", name)


FAULTS: dict[str, tuple[str, str, Callable[[Method], Method], str]] = {
    "every second token of an answer is swallowed": (
        "splitinfer.engine.coordinator.requests",
        "RequestState.take",
        every_second,
        "engine/coordinator/test_requests.py::test_tokens_become_text_and_times",
    ),
    "KV of all models lies under one key": (
        "splitinfer.kvstore.files",
        "Folder._path",
        of_one_group,
        "engine/stage/test_on_disk.py::test_other_models_and_dtypes_on_one_folder_do_not_meet",
    ),
    "dropped steps are completed": (
        "splitinfer.engine.device.steps",
        "StepsUnderWay._is_dropped",
        always(False),
        "engine/device/test_steps.py::test_what_is_dropped_is_never_completed_and_what_comes_after_is",
    ),
    "the thread of steps does not end": (
        "splitinfer.engine.device.steps",
        "StepsUnderWay.close",
        nothing,
        "engine/device/test_steps.py::test_its_thread_ends_with_it",
    ),
    "a step that was not sent is not reduced": (
        "splitinfer.core.scheduler.results",
        "Results.leave_out_void",
        nothing,
        "core/scheduler/test_unsent.py",
    ),
    "frames are not numbered": (
        "transports.framing",
        "Sequencer.admit",
        nothing,
        "transports/test_framing.py",
    ),
    "silence is not noticed": (
        "transports.framing",
        "Liveness.is_dead",
        always(False),
        "transports/test_framing.py::test_silence",
    ),
    "a sink is not woken": (
        "transports.inbox",
        "Inbox.pump",
        nothing,
        "transports/test_contract.py::test_contract[inproc-deliver_to]",
    ),
    "kept groups are not ended": (
        "transports.rdma.groups",
        "KeptGroups._expire",
        nothing,
        "transports/test_rdma_groups.py::test_groups_are_not_kept_for_ever",
    ),
    "a device is claimed twice": (
        "transports.rdma.devices",
        "_try_lock",
        always(True),
        "transports/test_rdma_groups.py::test_a_device_carries_one_link",
    ),
    "who was killed in a receive is not counted": (
        "transports.rdma.leftovers",
        "record",
        nothing,
        "transports/test_rdma_groups.py::test_who_had_to_be_killed_in_a_receive_is_counted",
    ),
}


def run(name: str, *, is_planted: bool) -> int:
    module, path, fault, test = FAULTS[name]
    owner: Any = importlib.import_module(module)
    *outer, last = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    if is_planted:
        setattr(owner, last, fault(getattr(owner, last)))
    return int(pytest.main([f"tests/{test}", "-x", *QUIETLY]))


def main() -> int:
    began, names = time.monotonic(), sys.argv[1:] or list(FAULTS)
    tasks = [partial(run, name, is_planted=is_planted) for name in names for is_planted in (False, True)]
    codes = in_processes(tasks, END_SECONDS)
    wrong = 0
    for name, without, planted in zip(names, codes[::2], codes[1::2], strict=True):
        if without != 0 or planted == 0:
            wrong += 1
            print(f"{name}: its test ends with {without} without the fault and with {planted} with it")
    print(f"{len(names) - wrong} of {len(names)} planted faults are found, in {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
