"""A model's folder: which one a name stands for, what it holds, and the files of its weights."""
