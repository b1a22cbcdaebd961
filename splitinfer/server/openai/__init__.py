"""OpenAI's API: what clients ask, as `Ask`s, and answers, as its documents and streams."""
