"""Text and token ids: tokenizers, and detokenizers that give one token at a time."""
