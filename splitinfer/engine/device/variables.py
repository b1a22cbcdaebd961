"""The environment variables that choose a process's device, which its local workers inherit. Imports nothing."""

ACCELERATOR = "SPLITINFER_ACCELERATOR"
"""A machine file, or the name of an example: its devices are emulated (``selection``)."""

LAUNCH_AHEAD = "SPLITINFER_LAUNCH_AHEAD"
"""``0``: each step is waited for before the next is launched, whatever the device; to measure what that costs."""
