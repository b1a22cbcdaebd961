"""Weights on their way between machines: who asks, who answers, and at which door.

    asking    takes items from one peer over a link, into the store
    outlet    answers one link's asks, in a thread of its own
    shelf     which models this machine lets others copy
    door      readers on a worker's port
    reader    a link to a worker that is asked for weights
    supply    where a worker that loads gets its weights: this machine, the coordinator, other workers, the hub

Who lacks weights asks, and asks for no more at a time than a window of bytes; so both ends hold little, and a sender
sends nothing that nobody wants. Where a sender serves meanwhile, it answers at a bounded rate.
"""
