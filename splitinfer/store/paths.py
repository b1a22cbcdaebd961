"""Where a machine keeps weights that were copied to it, and whether there is room for more.

Not in a folder of caches: macOS may remove what is there when its disk fills up (Apple, File System Programming Guide,
"macOS Library Directory Details", Library/Caches), and a copy may have taken hours.
"""

from pathlib import Path

from splitinfer.core.plain_text import megabytes
from splitinfer.places import data

RESERVE = 5 * 10**9  # bytes of the disk that stay free: macOS itself needs some for swap files


def default_folder() -> Path:
    """Return the folder for weights among the user's data."""
    return data() / "models"


def no_room(wanted: int, stored: int, free: int, cap: int | None, reserve: int = RESERVE) -> str | None:
    """Why ``wanted`` more bytes cannot be stored, as a phrase; ``None`` if they can.

    ``stored``: bytes in the store. ``free``: bytes on its disk. ``cap``: bytes that the store may have; ``None``: any
    number.

    >>> no_room(3 * 10**9, 0, 7 * 10**9, None)
    '3.0 GB are to be copied, and of the 7.0 GB free on the disk 5.0 GB stay free'
    >>> no_room(3 * 10**9, 9 * 10**9, 10**12, 10**10)
    '3.0 GB are to be copied, and with the 9.0 GB that are there the store would have over 10.0 GB'
    """
    if cap is not None and stored + wanted > cap:
        there = f"with the {megabytes(stored)} that are there the store would have over {megabytes(cap)}"
        return f"{megabytes(wanted)} are to be copied, and {there}"
    if wanted > free - reserve:
        there = f"of the {megabytes(free)} free on the disk {megabytes(reserve)} stay free"
        return f"{megabytes(wanted)} are to be copied, and {there}"
    return None
