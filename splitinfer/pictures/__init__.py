"""Turns pictures in prompts, as received bytes, into values for a model's tower and tokens for its prompt.

    sources      reads a picture from a data URL or an allowed file; nothing is ever fetched
    decoding     turns bytes into RGB in a separate process, with limits; ``decoder`` is that process
    sizes        computes the size of a picture for each family of models, alike in both processes
    families     a family's values, rows and placeholders, from a checkpoint's configuration

A model without a tower imports none of this, and only ``families`` is imported before the first picture comes. Pictures
come from strangers: bytes, numbers and pixels have bounds, and a sentence refuses a picture that exceeds them.
"""
