"""The kernels of this device, one of each kind: whether they are right, how long they take, and at how many rows a
row's result becomes another, because another kernel computes it (docs/understand/exactness.md)."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx

from splitinfer.models.memory import on_gpu
from splitinfer.probes.child import ProbeReport
from splitinfer.probes.finding import STOP, Blame, Finding, failed, passed
from splitinfer.probes.machine import largest

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 16, 18, 25, 32, 33, 64, 65)
_TIMED = (1, 32)  # rows
_CALLS = 8  # in one launch, so that its own time hardly counts
_MOST_OFF = 0.02  # of a row: several rounding errors of half precision
_EXPERTS, _HEADS, _KV_HEADS, _DIM = 4, 8, 2, 64
Kernel = Callable[[mx.array], mx.array]


def measure(_options: Mapping[str, Any], report: ProbeReport) -> None:
    """Report each kind."""
    size, dtype = (4096, mx.bfloat16) if on_gpu() else (256, mx.float32)
    x = mx.random.normal((ROWS[-1], size), key=mx.random.key(1)).astype(dtype)
    weight = (mx.random.normal((size, size), key=mx.random.key(2)) * size**-0.5).astype(dtype)
    for name, (kernel, reference) in _kinds(weight).items():
        report.guarded(name, partial(_judged, name, kernel, reference, x))


def _judged(name: str, kernel: Kernel, reference: Kernel, x: mx.array) -> Finding:
    return judge_kernel(name, tried(kernel, reference, x))


def _kinds(weight: mx.array) -> dict[str, tuple[Kernel, Kernel]]:
    """Return each kernel of rows [n, size], and the same in float32 on the processor."""
    found: dict[str, tuple[Kernel, Kernel]] = {"dense": (lambda x: x @ weight.T, _by_numbers(weight))}
    for name, how in (("4 bits", {"bits": 4}), ("8 bits", {"bits": 8}), ("mxfp4", {"mode": "mxfp4"})):
        found[name] = _quantised(weight, how)
    stack = mx.stack([weight[: weight.shape[0] // _EXPERTS]] * _EXPERTS)
    packed = mx.quantize(stack, bits=4)
    numbers = mx.dequantize(*packed, bits=4)[0]

    def experts(x: mx.array) -> mx.array:
        chosen = mx.arange(x.shape[0]) % _EXPERTS
        return mx.gather_qmm(x[:, None], *packed, rhs_indices=chosen, bits=4)[:, 0]

    found["experts in 4 bits"] = experts, _by_numbers(numbers)
    keys = mx.random.normal((1, _KV_HEADS, weight.shape[0] // 2, _DIM), key=mx.random.key(3)).astype(weight.dtype)

    def attention(x: mx.array) -> mx.array:
        queries = _queries(x)[None].swapaxes(1, 2)
        return mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=_DIM**-0.5)[0].swapaxes(0, 1).flatten(1)

    def exactly(x: mx.array) -> mx.array:
        q = _queries(x).reshape(-1, _KV_HEADS, _HEADS // _KV_HEADS, _DIM)
        scores = mx.softmax(mx.einsum("nhgd,hkd->nhgk", q, keys[0].astype(mx.float32)) * _DIM**-0.5, -1)
        return mx.einsum("nhgk,hkd->nhgd", scores, keys[0].astype(mx.float32)).flatten(1)

    return {**found, "attention": (attention, exactly)}


def _queries(x: mx.array) -> mx.array:
    """Return the heads' queries, [n, heads, dim], of numbers in the rows."""
    return mx.concatenate([x, x], -1)[:, : _HEADS * _DIM].reshape(-1, _HEADS, _DIM)


def _quantised(weight: mx.array, how: Mapping[str, Any]) -> tuple[Kernel, Kernel]:
    packed = mx.quantize(weight, **how)
    return lambda x: mx.quantized_matmul(x, *packed, **how), _by_numbers(mx.dequantize(*packed, **how))


def _by_numbers(weight: mx.array) -> Kernel:
    return lambda x: x @ weight.astype(mx.float32).T


def tried(kernel: Kernel, reference: Kernel, x: mx.array) -> dict[str, Any]:
    """Return what came of a kernel with the first rows of ``x`` [65, size].

    ``off``: its largest error in a row, relative to the row; ``changes``: the numbers of rows at which the first row's
    result is another than with the number before, in ``ROWS``; ``seconds``: of a call with 1 row, and with 32.
    """
    with mx.stream(mx.cpu):
        wanted = reference(x.astype(mx.float32))
        mx.eval(wanted)
    errors, changes, before = list[float](), list[int](), None
    for rows in ROWS:
        found = kernel(x[:rows])
        first, exact = found[0].astype(mx.float32), wanted[:rows]
        error = mx.linalg.norm(found.astype(mx.float32) - exact, axis=-1) / mx.linalg.norm(exact, axis=-1)
        errors.append(cast(float, error.max().item()))
        if before is not None and not mx.array_equal(before, first).item():
            changes.append(rows)
        before = first
    return {"off": largest(errors), "changes": changes, "seconds": [_seconds(kernel, x[:rows]) for rows in _TIMED]}


def _seconds(kernel: Kernel, x: mx.array) -> float:
    """Return the seconds of one call; the least of three launches."""
    inputs, least = [x + number for number in range(_CALLS)], float("inf")
    mx.eval(inputs)
    for _ in range(3):
        began = time.perf_counter()
        mx.eval([kernel(each) for each in inputs])
        least = min(least, (time.perf_counter() - began) / _CALLS)
    return least


def judge_kernel(name: str, given: Mapping[str, Any]) -> Finding:
    """Return whether a kernel is right, and where a row's result depends on how many rows there are."""
    if not given["off"] <= _MOST_OFF:  # it may be NaN
        return failed(name, Blame.DEVICE, f"a row is off by {given['off']:.2g} of itself", STOP, given)
    one, many = (f"{1e3 * seconds:.3g}" for seconds in given["seconds"])
    return passed(name, f"{one} ms for a row, {many} for {_TIMED[1]}; {_where(given['changes'])}", given)


def _where(changes: Sequence[int]) -> str:
    if not changes:
        return "a row's result does not depend on the number of rows"
    return f"a row's result changes at {', '.join(map(str, changes))} rows"
