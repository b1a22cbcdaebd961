"""Talks to this machine's operating system for a running stage: staying awake, scheduling, memory.

All of Apple's interfaces are in these few files; no other module imports ctypes for them. On other systems they do
nothing, or ask psutil. No failure here is an error: a machine that cannot be kept awake still computes.
"""
