"""Sends frames as packets of `framing`, each inside a frame of the link below, so that every fault is detected.

    send -> encode -> faults -> wire ----> link below ----> decode -> Sequencer -> recv

Checksums and numbers are added above the faults on every link, as in tcp://, and every fault ends the link. A peer that
is not emulated would take a packet for a frame; an emulated one refuses a frame that is not a packet. Frames lost at
the end are detected as well: whenever the wire is empty one BEAT follows, with the number of the next frame, and a
polite end begins with BYE. With `checksum_parts=False` a corrupted payload is delivered, as by tcp://.
"""

from __future__ import annotations

from transports.base import Frame, FrameError, LinkOptions
from transports.framing import Kind, Packet, Sequencer, as_bytes, decode, encode, reason_bytes


class Packets:
    """Encodes frames as packets inside frames of the link below: a packet's first byte string is the header, the others
    are the parts."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        self._sequencer = Sequencer()
        self._num_sent = 0
        self._num_announced = 0

    def data(self, flat: Frame) -> Frame:
        """The next DATA packet; its number is taken when `count_sent` is called."""
        parts = [as_bytes(part) for part in flat.parts]
        checksum = bool(self._options.checksum_parts)
        first, *_ = encode(Kind.DATA, seq=self._num_sent, header=flat.header, parts=parts, checksum=checksum)
        return Frame(bytes(as_bytes(first)), tuple(parts))

    def count_sent(self) -> None:
        self._num_sent += 1

    def beat(self) -> Frame | None:
        """A BEAT with the number of the next DATA packet; None if one was sent for that number."""
        if self._num_announced == self._num_sent:
            return None
        self._num_announced = self._num_sent
        return Frame(bytes(as_bytes(encode(Kind.BEAT, seq=self._num_sent)[0])))

    def bye(self, reason: str) -> Frame:
        return Frame(bytes(as_bytes(encode(Kind.BYE, seq=self._num_sent, header=reason_bytes(reason))[0])))

    def unpack(self, frame: Frame) -> Packet:
        """The packet in a frame. Raises FrameError if it is damaged, repeated, out of order, or after a missing one."""
        packet = decode([frame.header, *frame.parts], self._options)
        self._sequencer.admit(packet)
        if packet.kind in (Kind.OPEN, Kind.ACCEPT):
            raise FrameError(f"{packet.kind.name} on an open link")
        return packet
