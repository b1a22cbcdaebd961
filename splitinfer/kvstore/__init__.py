"""KV on disk: one stage's blocks as files in a folder. Bytes only; it knows nothing of arrays, plans or links.

    store     a stage's blocks by key: written behind, read at once, told of when written
    shelf     which files there are, which of them hold a block's layers, which go first when space is short (pure)
    record    one block as bytes (pure)
    care      the folder as a person sees it: list, remove, clean up

Nothing in the folder is trusted. Another process may write, evict and delete in it at any time; a file may be cut
short, damaged or of another model. Whatever is wrong with one, it is as if it were not there.
"""
