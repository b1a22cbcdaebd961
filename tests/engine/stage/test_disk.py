"""Which group of files a stage's KV belongs to."""

import pytest

from splitinfer.core.fingerprint import Fingerprint
from splitinfer.engine.stage import disk
from splitinfer.engine.stage.disk import group_of
from splitinfer.wire.messages import Load


def command(root: bytes = b"root", stage: int = 0) -> Load:
    return Load("demo", "auto", stage, (0, 2, 4), Fingerprint("f"), 9, 64, root, "exact", "", float32_head=False)


def test_all_that_kv_depends_on_is_in_the_name_of_its_group(monkeypatch: pytest.MonkeyPatch):
    """With the dtype "auto" the coordinator's root is the same for a GPU, which keeps the weights' dtype, and for a
    processor, which computes in float32."""
    dtypes = [None, "float32", "float16"]
    groups = [group_of(command(), dtype) for dtype in dtypes]
    groups.append(group_of(command(b"other weights"), None))
    monkeypatch.setattr(disk, "device_name", lambda: "Apple M4 Max")
    groups += [group_of(command(), dtype) for dtype in dtypes]
    openblas = disk.has_openblas()
    monkeypatch.setattr(disk, "has_openblas", lambda: not openblas)
    groups += [group_of(command(), dtype) for dtype in dtypes]
    assert len(set(groups)) == len(groups) == 10
    assert group_of(command(stage=1), None) == groups[-3], "stages of other layers find each other's files"
