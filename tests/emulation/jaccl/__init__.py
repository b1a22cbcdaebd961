"""A stand-in for JACCL on machines without Thunderbolt 5: the limits and faults that others met on Macs, for tests.

JACCL runs on Macs only, and what makes it hard is not in its interface: MLX's ring, over which all else is tested, has
none of it. So here a pair of devices, joined by an emulated cable, behaves as badly as has been reported. With
`SPLITINFER_EMULATED_JACCL=FOLDER` in the environment of a process, the devices are those that `World.make` wrote to
that folder, `transports.rdma.probe` finds them, and in the child of an rdma link `mx.distributed.init`, `send`, `recv`
and `all_sum` are replaced for the backend `jaccl`. All else is the code that runs on a Mac. The variable is for tests:
no option, layout or address sets it.

What is modelled, and where it was reported (`mlx#` is an issue or pull request of ml-explore/mlx, "source" its folder
`mlx/distributed/jaccl/lib`); *assumed*: no source says so, and the worse of the likely ways was chosen.

a. Consecutive messages of different sizes hang or bring wrong data (mlx#3149). Here: a receive of another size than
   the one before, without a sum between them, never returns.
b. What JACCL's frames depend on, the versions of macOS at the two ends, is each device's own (`World.make`). Ends whose
   frames differ are refused before they join (`transports.rdma.probe`), so the frames themselves are not modelled.
c. The status of a completion is never read (source; mlx#3152): what failed counts as success. Here: `World.plan` makes
   the next messages of a device arrive damaged or not at all, and no end is told.
d. About 100 memory regions a device (mlx#3162: the call returns NULL), of which a group of two takes 64: a second one
   fails with `[jaccl] Register memory region failed` (source). At most 10 queue pairs a device.
e. Nothing has a timeout, and nobody is told that a peer is gone (mlx#3910, mlx#4278): a receive waits for ever, a send
   to a dead peer succeeds at once, one to a peer that does not receive waits when the buffers on the way are full.
   A message that is missing is waited for.
f. A peer has one completion queue for sends and receives, and neither looks whose completion it took (source:
   `MeshImpl::send`, `recv`). Here: an operation that begins while another is in progress raises, and is counted
   (`World.overlaps`), so that a test can fail.
g. A process killed within a receive leaves its memory wired until a restart (mlx#3910). Here: such a process leaves its
   64 regions and a queue pair behind.
h. The first message after joining is lost unless a sum was made before (mlx#3149).

Also: a device that is not cabled to the peer's fails with `Changing queue pair to RTR failed with errno 60`
(mlx#4530), one that is not in `ibv_devices` with `Could not find device` (source), and a pulled cable ends the process
by SIGSEGV in its next operation (mlx#4192).

Not modelled: that many groups one after the other exhaust the protection domains (mlx#3207), that waiting takes a whole
core (it would take one from the tests), speed, and the GPU.

Files: `world` the folder: devices, cables, planned faults · `device` what is registered on a device, which outlives
processes · `wire` messages between two processes · `group` what replaces MLX's functions.
"""
