"""Stores weights that were copied from another machine: the requests, the checks and the files.

Bytes only: nothing here knows arrays, links or layers. A machine takes only the tensors of a model that it asks for,
and a few small files.

    manifest    a model's small files and tensors; the bytes that the sender holds; the allowed names. Pure
    ranges      ranges of bytes: which are missing, the pieces to ask for, the pace of sending. Pure
    copied_file one file of weights, with holes where nothing was copied, and the journal of the copied ranges
    models      the store: its folder, the models in it by their fingerprints, and its locks
    source      reads ranges of a model's files, and notices when a file changes

The link authenticates the sender and its bytes. The fingerprint identifies the model and its version. A checksum
of each range finds damage in memory between the sender's reading and this machine's writing.
"""
