"""Weights on their way between machines.

    copying      asks one peer for ranges of a model's files, and writes them into the store; a link to such a peer
    answering    answers such requests, each link's in a thread of its own; which models others may copy from here
    weight_source    where a worker that loads gets its weights: this machine, the coordinator, other workers, the hub

    AskManifest -> TellManifest             what a model consists of, and what of it the sender holds
    AskRanges   -> TellRange, TellRange...  bytes of its files, each range with a checksum
                -> Unavailable              in place of either: a sentence

Who lacks weights asks, and asks for no more at a time than a window of bytes; so both ends hold little, and a sender
sends nothing that nobody wants. Where a sender serves meanwhile, it answers at a bounded rate.
"""
