"""Frames as packets of `framing`, each inside a frame of the link below, so that every fault is noticed.

    send -> encode -> faults -> wire ----> link below ----> decode -> Sequencer -> recv

Checksums and numbers stand above the faults, as they do in tcp://, whichever link carries them, and every fault ends
the link. An unwrapped peer would take a packet for a frame; a wrapped one refuses a frame that is no packet. A lost
tail shows as well: whenever the wire is empty one BEAT follows, with the number that should come next, and BYE goes
before a polite end. With `checksum_parts=False` a corrupted payload is delivered, as it would be by tcp://.
"""

from __future__ import annotations

from transports.base import Frame, FrameError, LinkOptions
from transports.framing import Kind, Packet, Sequencer, as_bytes, decode, encode, reason_bytes


class Packets:
    """Frames as packets inside frames of the link below: the first string of a packet is the header, the rest parts."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        self._sequencer = Sequencer()
        self._num_sent = 0
        self._num_told = 0

    def data(self, flat: Frame) -> Frame:
        """The next DATA packet; it counts once `count_sent` was called."""
        parts = [as_bytes(part) for part in flat.parts]
        checksum = self._options.checksum_parts
        first, *_ = encode(Kind.DATA, seq=self._num_sent, header=flat.header, parts=parts, checksum=checksum)
        return Frame(bytes(as_bytes(first)), tuple(parts))

    def count_sent(self) -> None:
        self._num_sent += 1

    def beat(self) -> Frame | None:
        """A BEAT with the number of the next DATA packet; None if one has said that."""
        if self._num_told == self._num_sent:
            return None
        self._num_told = self._num_sent
        return Frame(bytes(as_bytes(encode(Kind.BEAT, seq=self._num_sent)[0])))

    def bye(self, reason: str) -> Frame:
        return Frame(bytes(as_bytes(encode(Kind.BYE, seq=self._num_sent, header=reason_bytes(reason))[0])))

    def unpack(self, frame: Frame) -> Packet:
        """Raises FrameError for whatever is damaged, doubled, out of order, or after something missing."""
        packet = decode([frame.header, *frame.parts], self._options)
        self._sequencer.admit(packet)
        if packet.kind in (Kind.OPEN, Kind.ACCEPT):
            raise FrameError(f"{packet.kind.name} on an open link")
        return packet
