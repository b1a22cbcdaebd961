"""The device that computes a stage's steps: launch arrays, get a ticket; a ticket is done when the device says so.

device          the interface; what is launched, and when the device computed it
mlx_device      MLX: a CPU, which computes while it launches; a GPU, which computes afterwards
emulated        an emulated accelerator: computes on the CPU, in the times of a machine file
strict          what the CPU lets pass and a GPU does not, caught on an emulated accelerator
selection       which of them a process uses
late_steps      how often an emulated accelerator was too slow
steps           the steps under way: each is completed when it is done, whatever the launching thread is doing
"""
