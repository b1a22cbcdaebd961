r"""rdma://host:port: frames over a group of `mx.distributed`, set up and supervised over a tcp link.

    engine                       a process of its own                              engine
    RdmaLink --shared memory--> child (rank 0) ==group==> child (rank 1) --shared memory--> RdmaLink
        \                                                                                     /
         +----------------- control: a tcp link, encrypted with LinkOptions.security --------+

On Macs the group's backend is JACCL, which is RDMA over Thunderbolt 5; `ring` runs the same code anywhere. Tested over
MLX's ring, and over `tests.emulation.jaccl`, which has JACCL's limits; **not run on a Mac**.

**Directions.** Frames from the connector (hidden states) go over the group; all others go over the control link. So
the group has one writer and one reader: JACCL does not check whether a completion belongs to a send or to a receive.

**A child process**, because a process cannot leave a group: MLX keeps it until the process ends, and an operation whose
peer is silent waits for ever at 100 % of a core and ignores signals (of `ring` in MLX 0.32.4 one whose peer was killed
raises an error). The child ends with its parent, however that ends.

**Framing.** A group transmits no sizes. On JACCL a receive of another size than its send shifts or loses bytes without
an error, and sizes in succession hang or bring wrong data (mlx#3149). So all messages of a link have one size
(`messages`): a generated token is one of them, padded; a prompt is as many as it takes.

**Checksums.** Wrong data was seen to come without an error (mlx#3152, mlx#4342). So each message has a number, a
checksum over all its bytes and a nonce, which was agreed over the control link: other senders' bytes are refused. But
messages are not encrypted, and anyone on the cable can read: use a direct one.

**The end.** Whatever ends the control link ends this one: silence, a lost connection, a close. So do the end of either
child, and a group that delivers nothing although something was sent. A reader is released, not killed: a process that
is killed within a receive of JACCL leaves memory wired until a restart (mlx#3910). So the last message of a sending
child says that nothing follows. Only if the sender is killed must the reader be killed too, and the log says so.
"""

from transports.rdma.transport import RdmaTransport

__all__ = ["RdmaTransport"]
