"""Weights that were copied from another machine: what is asked for, what is checked, and where it lies here.

Bytes only: nothing here knows arrays, links or layers. Of a model a machine takes the tensors that it asks for and a
few small files, nothing else.

    manifest    what a model has: its small files and its tensors; which bytes the sender holds; which names are
                allowed. Pure
    ranges      ranges of bytes: which are missing, in which pieces they are asked for, how fast they are sent. Pure
    copied_file one file of weights, with holes where nothing was copied, and the journal of what was
    models      the store: its folder, the models in it, by their fingerprints, and its locks
    source      reads ranges of a model's files, and notices when a file changes

The link authenticates the sender and its bytes. The fingerprint says which version of which model is copied. A checksum
of each range finds what a memory damages between the sender's reading and this machine's writing.
"""
