"""The machine: the seconds of a pipeline's devices, links and drafts, described in a file or measured. Pure.

machine         the costs of every stage, and what its device is like
device_queue    the times of a device's steps, given when they are launched
files           reads machines and profiles from files
numbers         how all of them are checked, written and read
profile         what was measured of machines, links and a model, from which layouts are planned
selection       which machine this process emulates
"""
