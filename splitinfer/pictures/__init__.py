"""Pictures in prompts: from the bytes that somebody sends to values for a model's tower and tokens for its prompt.

    sources      where a picture may come from: data URLs, files where allowed; nothing is ever fetched
    decoding     bytes to RGB in a process of its own, with limits; ``decoder`` is that process
    sizes        how large each family of models wants a picture: arithmetic, the same in both processes
    families     a family's values, rows and placeholders, from a checkpoint's configuration

Nothing of this is imported by a model without a tower, and nothing beyond ``families`` before the first picture comes.
Pictures are what strangers send: bytes, numbers and pixels have bounds, and what exceeds them is refused in a sentence.
"""
