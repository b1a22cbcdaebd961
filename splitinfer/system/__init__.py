"""This machine's operating system, as far as a running stage has to do with it: staying awake, being scheduled, memory.

Everything that is Apple's is in these few files, and nothing above imports ctypes for it. On other systems it does
nothing, or asks psutil. No failure here is an error: a machine that cannot be kept awake still computes.
"""
