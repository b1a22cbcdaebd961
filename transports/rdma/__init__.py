"""rdma://host:port: frames over a group of `mx.distributed`, set up and supervised over a tcp link.

    engine                       a process of its own                              engine
    RdmaLink --shared memory--> child (rank 0) ==group==> child (rank 1) --shared memory--> RdmaLink
        \\                                                                                    /
         +----------------- control: a tcp link, encrypted with LinkOptions.security --------+

On Macs the group's backend is JACCL, which is RDMA over Thunderbolt 5; `ring` runs the same code anywhere.

**Which direction uses what.** The connecting side sends hidden states downstream, megabytes of them, and receives
token ids, a few bytes. So frames from the connector go over the group, and everything else over the control link: the
frames of the other direction, heartbeats, progress, the end and its reason. The group then has one writer and one
reader at all times. This is necessary: JACCL polls one completion queue per peer and does not check whether a
completion belongs to a send or to a receive, so one process must never have both in progress. Order is promised per
direction, and all frames of a direction take the same path.

**Why a child process.** A process cannot leave a group: MLX keeps it until the process ends, there are no timeouts, and
an operation whose peer is gone waits for ever at 100 % of a core and ignores signals. So the group is in a process that
can be killed. The child ends with its parent, however that ends.

**Framing.** A group transmits no sizes, and on JACCL a receive of another size than its send shifts or loses bytes
without an error, and messages of different sizes in succession hang or bring wrong data (mlx#3149). So all messages of
a link have one size (`messages`): a generated token is one of them, padded; a prompt is as many as it takes. Credits
over the control link would allow several sizes, and cost each token the round trip that RDMA saves. Both ends agree
about the framing before they join, since ends that disagree could not even exchange their versions.

**Checksums.** JACCL never reads the status of a completion (mlx#3152): what failed counts as received, and wrong data
was seen to come without an error (mlx#4342). So each message has a number, a nonce and a checksum over all its bytes,
which the children write and check, beside the engines' own work; any mismatch ends the link before its content reaches
the engine.

**Rest.** A waiting receive uses a whole core, so a reader sleeps when nothing is sent to it (`link`).

**The end.** What ends the control link ends this one: silence, a lost connection, a close. So does the end of either
child, and a group through which nothing arrives although something was sent: because a child hangs, or because control
link and group are on different cables.

**A reader is released, not killed.** A process that is killed within a receive of JACCL leaves memory wired until a
restart (mlx#3910). So a child that sends always says last of all that nothing follows, whichever end goes first and
however; only where that child itself is killed or stands still the other must be killed within its receive, and a line
in the log says so.

The group's messages are neither encrypted nor authenticated. The nonce at the beginning of each message was agreed over
the control link, so other senders' bytes are refused, but anyone on the cable can read: use a direct cable.

Tested over MLX's ring, and over `tests.emulation.jaccl`, which has JACCL's limits; **not run on a Mac**.

Files: `address` what may follow rdma:// · `probe`, `macos` whether this machine can use a backend, and two together ·
`transport` connecting and listening · `handshake` from a control link to a group · `link` the link · `child_process`
the engine's handle on its child · `child` the code of the child · `channel`, `segment`, `messages` what they exchange.
"""

from transports.rdma.transport import RdmaTransport

__all__ = ["RdmaTransport"]
