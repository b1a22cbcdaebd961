"""Prompts as token ids, and token ids as text, for one model. From any number of threads at a time, without a lock.

A Hugging Face tokenizer must not be changed by one thread while another uses it (tokenizers' "Already borrowed").
Encoding changes it the first time only, to settings that are always the same from then on. So a text is encoded once
before any other; after that ``_encode_plus`` of transformers 5 only reads, and so does decoding (tokenizers 0.23 takes
the tokenizer as ``&self`` for both).
"""

from collections.abc import Sequence

from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import ContextExceeded, ModelError, RequestError
from splitinfer.models.folder.checkpoint import Checkpoint, end_tokens
from splitinfer.text.detokenizer import Detokenizer
from splitinfer.text.tokenizer import Tokenizer


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """Load the model's tokenizer; ``None`` where the folder has none, so that prompts must be token ids."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((checkpoint.folder / name).exists() for name in names):
        return None
    config = checkpoint.config
    return Tokenizer.from_folder(checkpoint.folder, end_tokens(checkpoint.folder, config), config.get("model_type"))


class Prompts:
    """Checks prompts, and says how answers end and become text. ``tokenizer``: the model's; ``None`` where its folder
    has none. ``control_in_texts``: as in ``Settings``."""

    def __init__(self, checkpoint: Checkpoint, *, control_in_texts: bool = False) -> None:
        self._checkpoint = checkpoint
        self.tokenizer = tokenizer_of(checkpoint)
        if self.tokenizer is not None:
            self.tokenizer.control_in_texts = control_in_texts
            self.tokenizer.encode("")  # changes what it has to change

    @property
    def needed(self) -> Tokenizer:
        """The tokenizer, where there is no doing without.

        Raises:
            ModelError: the model's folder has none.
        """
        if self.tokenizer is None:
            raise ModelError(f"{self._checkpoint.folder} has no tokenizer, so prompts must be token ids")
        return self.tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens that may be sampled."""
        return self.tokenizer.vocab_size if self.tokenizer is not None else self._num_embeddings

    @property
    def _num_embeddings(self) -> int:
        return self._checkpoint.vocab_size or 2**31 - 1

    def check(self, tokens: Sequence[int], context_length: int) -> None:
        """Check a prompt.

        Raises:
            ContextExceeded: it is too long.
            RequestError: it is empty, or has ids outside the vocabulary.
        """
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) >= context_length:
            most = self._checkpoint.context_length
            more = f"; the model has {most:,} (see --context)" if most > context_length else ""
            raise ContextExceeded(f"the prompt has {len(tokens):,} tokens; at most {context_length - 1:,} fit{more}")
        size = self._num_embeddings
        bad = next((t for t in tokens if not 0 <= t < size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the model's vocabulary of {size:,}")

    def check_ids(self, params: SamplingParams) -> None:
        """Check the token ids of a request's parameters.

        Raises:
            RequestError: one is outside the vocabulary.
        """
        size, biased = self._num_embeddings, [token for token, _ in params.logit_bias]
        for name, ids in (("logit_bias", biased), ("stop_token_ids", params.stop_token_ids)):
            if (bad := max(ids, default=0)) >= size:
                raise RequestError(f"{name} has token id {bad}, but the model's vocabulary is {size:,}")

    def end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end an answer. One in the form of a grammar ends where that does, whatever else is
        asked."""
        stops = frozenset(params.stop_token_ids)
        return stops if params.ignore_eos and params.grammar is None else stops | self.eos_tokens

    @property
    def eos_tokens(self) -> frozenset[int]:
        """The model's own tokens that end a text."""
        if self.tokenizer is not None:
            return self.tokenizer.eos_token_ids
        eos = end_tokens(self._checkpoint.folder, self._checkpoint.config)
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    def detokenizer(self, behind: Sequence[int] = ()) -> Detokenizer | None:
        """Return a detokenizer for one answer, for one thread at a time; ``None`` without a tokenizer. Its text has the
        marks of reasoning and of calls. ``behind``: the prompt's last tokens, if the answer goes on with its text."""
        return None if self.tokenizer is None else self.tokenizer.detokenizer(shows_markers=True, behind=behind)
