"""The device that computes a stage's steps: launch arrays, get a ticket; a ticket is done when the device says so.

device          the interface; what is launched, and when the device computed it
mlx_device      MLX: a CPU, which computes while it launches; a GPU, which computes afterwards
selection       which device a process uses: MLX's, or in a checkout an emulated accelerator (`tests/emulation`)
steps           the steps under way: each is completed when it is done, whatever the launching thread is doing
"""
