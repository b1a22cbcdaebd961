"""Weights that were copied from another machine: what is asked for, what is checked, and where it lies here.

Bytes only: nothing here knows arrays, links or layers. Of a model a machine takes the tensors that it asks for and a
few small files, nothing else.

    names       which files of a model are taken at all, and that a name is no path
    manifest    what a model has: its small files and its tensors, with their sizes; and who has them
    pieces      items in pieces of two megabytes, and how many may be under way
    parts       which tensors lie together in one file, and its header
    pace        how fast a sender may send beside serving
    paths       the store's folder, and room on its disk

    part        one file that is being written: pieces that were checked, kept across restarts
    models      the store: the models in it, by their fingerprints
    source      reads pieces of a model's files, and notices when a file changes
    holding     locks between the processes that share a store
    hearsay     which parts rest on the word of one machine

The first six decide and touch nothing (``paths`` asks the environment for a folder's name); the last five act.

A part becomes visible under its name only when each of its tensors is complete, so a reader never meets a hole. The
checksum of every piece that was written is kept beside it. A copy that was interrupted, whatever by, reads what it
wrote back, compares it with these checksums, and asks for the rest.
"""
