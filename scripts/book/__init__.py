"""The book: what `mkdocs` needs to know, and the pages that are made of the code."""
