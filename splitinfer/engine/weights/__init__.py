"""Weights on their way between machines.

    AskManifest -> TellManifest             what a model consists of, and what of it the sender holds
    AskRanges   -> TellRange, TellRange...  bytes of its files, each range with a checksum
                -> Unavailable              in place of either: a sentence

Who lacks weights asks, and asks for no more at a time than a window of bytes; so both ends hold little, and a sender
sends nothing that nobody wants. Where a sender serves meanwhile, it answers at a bounded rate.
"""
