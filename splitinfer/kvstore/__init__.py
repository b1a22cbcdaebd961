"""KV on disk: one stage's blocks as files in a folder. It handles bytes only, no arrays, plans or links.

Nothing in the folder is trusted. Another process may write, evict and delete in it at any time; a file may be cut
short, damaged or of another model. A file with any fault is treated as missing.
"""
