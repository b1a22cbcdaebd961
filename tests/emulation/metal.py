"""Which kernel of MLX's Metal back end computes a product or attention: read in MLX's source, as no Mac was at hand.

A row's result changes where its kernel does, and only there: the kernels here are named by what decides the order in
which they add. Files and lines are of ml-explore/mlx at 846d1762 (22 August 2026, between 0.32.2 and 0.32.4):
``Q`` is mlx/backend/metal/quantized.cpp, ``M`` matmul.cpp, ``S`` scaled_dot_product_attention.cpp. ``M'`` and ``S'``
are M at 2a145407 and S at 3ae665ab, which are newer. 0.32.4's wheel for Macs has the limits of Q, M and M' in its
machine code (``libmlx.dylib``: ``QuantizedMatmul::eval_gpu``, ``dispatch_qmv``, ``qmm_splitk``,
``steel_matmul_axpby``), and the kernels of S' (``mlx.metallib``).
"""

from dataclasses import dataclass

_HALF = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU by MLX's name of its architecture: ``generation`` 13 is M1, 17 is M5; ``size`` "g" is the base chip and "s"
    and "d" the large ones. ``nax``: whether matrix units are used (M5 with macOS 26.2)."""

    generation: int
    size: str
    nax: bool = False


CHIPS = {
    "M1": Chip(13, "g"), "M2 Ultra": Chip(14, "d"), "M3": Chip(15, "g"), "M4 Max": Chip(16, "s"),
    "M3 Ultra": Chip(15, "d"), "M5": Chip(17, "g", nax=True), "M5 Max": Chip(17, "s", nax=True),
}  # fmt: skip


def quantised(chip: Chip, rows: int, width: int, out: int, mode: str = "affine", transpose: bool = True) -> str:
    """The kernel of a product [rows, width] by quantised weights [out, width], or [width, out] (Q:1782)."""
    if not transpose:
        return "qvm" if rows < 4 else "qmm_n"  # Q:1805
    if rows >= _quantised_limit(chip, width, out):  # Q:1807
        parts = _quantised_parts(rows, width, out)
        return f"qmm{'_nax' if chip.nax else ''}" if parts == 1 else f"qmm_splitk {parts}"
    if width in (64, 128):
        return "qmv_quad"  # Q:1755
    if rows >= 2 and (mode != "affine" or chip.generation >= 15):
        return "qmv_wide"  # Q:1762; the lanes that share a row depend on the mode alone, Q:569
    return "qmv"


def _quantised_limit(chip: Chip, width: int, out: int) -> int:
    """Q:85."""
    size = 0 if max(width, out) <= 2048 else 1 if max(width, out) <= 4096 else 2
    if chip.size == "d":
        return (32, 18, 12)[size]
    by_generation = {17: (33, 25, 13), 16: (13, 15, 13), 15: (13, 15, 13), 14: (14, 10, 6), 13: (14, 10, 6)}
    return by_generation[chip.generation][size]


def _quantised_parts(rows: int, width: int, out: int, group: int = 64) -> int:
    """Q:1135."""
    parts = max(1, 512 // (-(-out // 32) * -(-rows // 32)))
    parts = min(parts, max(1, width // group))
    while parts > 1 and width % (parts * group):
        parts -= 1
    return parts


def dense(chip: Chip, rows: int, width: int, out: int, dtype: str = "bfloat16", *, is_alone: bool = True) -> str:
    """The kernel of a product [rows, width] by weights [out, width] (M:1451), alone or one of several at once."""
    if rows > 1 and out > 1 and chip.generation >= 15 and width % 4 == 0 and dtype in _HALF and rows <= 15:  # M:1299
        return f"gemv_wide {32 if rows <= 5 or out <= 64 else 16}"
    if min(rows, out) == 1:
        return "gemv"  # M:1545
    if chip.nax and dtype in _HALF:  # M:948
        if is_alone and min(rows, out) <= 64:
            return "steel_thin_nax"  # M', steel_matmul_axpby, case 2
        is_long = width >= 3 * max(rows, out) or (max(rows, out) <= 1024 and width > 2 * max(rows, out))
        return "steel_splitk_nax" if is_alone and is_long else "steel_nax"
    tiles, most = -(-rows // 16) * -(-out // 16), 2048 if chip.size in "sd" else 1024
    if is_alone and tiles <= most and width >= 128 and width >= max(rows, out):  # M:925
        tiles = -(-rows // 32) * -(-out // 32)  # M:524
        ratio = width // 16 // tiles
        return f"steel_splitk {min(max(2, 1 << max(0, ratio - 1).bit_length()), 32)}"
    return "steel"


def experts(pairs: int, num_experts: int, *, is_sorted: bool, is_quantised: bool) -> str:
    """The kernel of ``pairs`` of a row and an expert: each is a product of its own, but where many are sorted (Q:1905,
    M:2838)."""
    if is_sorted and (not is_quantised or (pairs >= 16 and pairs // num_experts >= 4)):
        return "sorted"
    return "gathered"


def attention(chip: Chip, rows: int, keys: int, dim: int, repeats: int, *, has_mask: bool = False) -> str:
    """The kernel of causal attention of queries that are ``rows`` long over ``keys`` positions, ``repeats`` query heads
    to a KV head (S:715). ``has_mask``: the mask is an array."""
    if rows > 8:  # S:658, S:762
        is_long = dim == 256 and (rows >= 1024 if chip.nax else rows >= 2048 and rows == keys)  # S', use_fallback
        is_fused = dim in (64, 72, 80, 96, 128) or is_long
    else:  # S:675, S:765
        is_fused = dim in (64, 96, 128, 256) and rows * repeats <= 32 and rows <= keys
        if dim == 512:  # S', has_fused_kernel
            is_fused = rows == 1 and repeats == 8 and keys >= 1024 and not has_mask
    if not is_fused:
        return f"unfused {dense(chip, rows, dim, keys, is_alone=False)}"
    if rows > 8:
        return "full"
    if (chip.size in "sd" and keys >= 1024) or (repeats > 1 and keys >= 4096):  # S:872
        shares = rows == 1 and not has_mask and keys >= 8192 and dim in _SHARED.get(repeats, ())
        return f"vector_2pass{'_gqa' if shares else ''} {_attention_parts(chip, rows * repeats, keys)}"
    return "vector"


_SHARED = {8: (64, 128), 12: (128,), 16: (128,)}
"""Sizes of heads whose queries share what is read, by the queries to a KV head (S', sdpa_vector_2pass)."""


def _attention_parts(chip: Chip, simds: int, keys: int) -> int:
    """S:485."""
    if chip.size == "s":
        if keys <= 1024 or simds <= 4:
            return 64
        return 128 if keys <= 8192 else 256 if keys <= 32768 else 512 if keys <= 65536 else 1024
    if chip.size == "d":
        if simds <= 2 and keys > 8192:
            return 256
        return 128 if simds < 6 or keys < 16384 else 512 if keys < 65536 else 1024
    return 64 if simds >= 4 else 32
