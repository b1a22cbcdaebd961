"""Weights on their way between machines.

    AskManifest -> TellManifest             the model's files and tensors, and which of them the sender holds
    AskRanges   -> TellRange, TellRange...  bytes of its files, each range with a checksum
                -> Unavailable              a sentence that says why, in place of either

The machine that lacks weights asks for them, for no more than a window of bytes at a time. So both ends hold little in
memory, and a sender sends only wanted bytes. A sender that also serves requests answers at a bounded rate.
"""
