"""What becomes of fields that several APIs have: the same for all, in the same words."""

from splitinfer.server.fields import Honoured, Ignored, Refused, Size

# OpenAI itself takes 64 or 128 characters of names; other servers take more, and some clients send more.
NAME = Size(characters=512)
BY_KEYS = Ignored("requests are told apart by their keys", NAME)
CACHED = Ignored("a prompt's beginning is found in the cache by its tokens")
FOR_TEMPLATE = Honoured("where the model's template knows it")
NOT_FORCED = Refused("a model cannot be made to call a tool; auto and none are")
