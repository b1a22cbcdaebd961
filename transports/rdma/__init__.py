"""rdma://host:port: frames over a group of `mx.distributed`, set up and watched over a tcp link.

    engine                       a process of its own                              engine
    RdmaLink --shared memory--> child (rank 0) ==group==> child (rank 1) --shared memory--> RdmaLink
        \\                                                                                    /
         +----------------- control: a tcp link, encrypted if LinkOptions say so ------------+

On Macs the group's backend is JACCL, which is RDMA over Thunderbolt 5; `ring` runs the same code anywhere.

**Who carries what.** The connecting side brings hidden states downstream, megabytes of them, and gets token ids back,
a few bytes. So what the connector sends goes over the group, and everything else over the control link: the frames of
the other direction, heartbeats, progress, the end and its reason. The group then has one writer and one reader for all
its life. It must: JACCL polls one completion queue per peer and does not look whether a completion belongs to a send or
to a receive, so the two must never be under way in one process at a time. Order is promised per direction, and each
direction has one road.

**Why a child process.** A group cannot be left: MLX keeps it until the process ends, there are no timeouts, and an
operation whose peer is gone waits for ever at 100 % of a core, deaf to signals. So the group lives in a process that
can be killed. The child ends with its parent, whichever way that goes.

**Framing.** A receiver must know the size of a message beforehand, and a wrong guess is not an error but a silent shift
of all bytes that follow. So the first message of a frame has a fixed size and says in a header of its own what follows
(`messages`); a generated token is that one message. Number, nonce and checksum are checked before any length is
believed; anything that does not fit ends the link.

**Rest.** A waiting receive burns a core. A writer that has had nothing to send for a while says so, and its reader
sleeps until a word on the control link wakes it.

**The end.** What ends the control link ends this one: silence, a lost connection, a goodbye. So does the end of either
child, a child that stands still, and a group through which nothing comes though something was sent. Control link and
group may be on different cables, hence the last.

What the group carries is neither encrypted nor authenticated. The nonce that each message begins with was agreed over
the control link, which keeps strangers' bytes out, not their eyes: use a cable of your own.

Files: `address` what may follow rdma:// · `probe` whether this machine can · `transport` connecting and listening ·
`handshake` from a control link to a group · `link` the link · `carrier` the engine's hold on its child · `child` the
process · `channel`, `segment`, `messages` what passes between and how.
"""

from transports.rdma.transport import RdmaTransport

__all__ = ["RdmaTransport"]
