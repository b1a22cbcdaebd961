"""KV on disk: one stage's blocks as files in a folder. It handles bytes only, no arrays, plans or links.

    store         a stage's blocks by key: written in the background, read at once, reported when written
    index         file names; which files hold a block's layers, which are evicted first (pure)
    record        one block as bytes (pure)
    files         lists, reads, writes and removes the files
    maintenance   the folder for a person: list, remove, clean up

Nothing in the folder is trusted. Another process may write, evict and delete in it at any time; a file may be cut
short, damaged or of another model. A file with any fault is treated as missing.
"""
