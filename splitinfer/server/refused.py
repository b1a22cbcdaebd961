"""Fields that would change an answer and that this server does not have.

They belong to OpenAI, Anthropic, vLLM, llama.cpp, mlx-lm, LM Studio and Ollama. Their clients often send them with the
value that asks for nothing. One table serves all APIs: the server does not look up a field that the API has here. A
field that changes no word of an answer is ignored (``fields``), and so is a field that needs a refused one.
"""

from collections.abc import Mapping
from typing import Any

from splitinfer.server.fields import EMPTY, RefusedField

Table = Mapping[str, RefusedField]


def _all(why: str, *neutral: Any, names: str) -> dict[str, RefusedField]:
    return {name: RefusedField(why, neutral) for name in names.split()}


def _named(here: str, *neutral: Any, names: str) -> dict[str, RefusedField]:
    return _all(f"its name here is {here}", *neutral, names=names)


def _has_no_sampling(options: Any) -> bool:
    """Return whether Ollama's options concern its memory only."""
    return isinstance(options, dict) and not options.keys() & _OLLAMAS


_OLLAMAS = {
    "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "num_predict", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "mirostat",
}  # fmt: skip
_LLAMA_CPPS_ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
_NO_SAMPLER = "this way of sampling is not implemented"
_STATELESS = "nothing is stored here; give the whole conversation"
_NO_BLANKS = "JSON is written without blanks, or as its schema says"
_FORM = (
    "the form of an answer is output_config.format of messages, format of Ollama's API, response_format or text.format "
    "of OpenAI's"
)

_SAMPLING: Table = {
    **_all(_NO_SAMPLER, 1, names="typical_p tfs_z"),
    **_all(_NO_SAMPLER, 0, names="mirostat dynatemp_range dry_multiplier xtc_probability n_indent"),
    **_all(_NO_SAMPLER, -1, 0, names="top_n_sigma adaptive_target"),
    **_all(_NO_SAMPLER, 0, 1, names="min_keep"),
    "samplers": RefusedField("the order of the samplers is fixed", (*EMPTY, _LLAMA_CPPS_ORDER)),
    "use_beam_search": RefusedField("there is no beam search", (False,)),
    **_all("logit_bias keeps tokens away", *EMPTY, names="bad_words allowed_token_ids"),
    **_all("no code of a client is run here", *EMPTY, names="logits_processors custom_logit_processor"),
    **_all("there is one model, without adapters", *EMPTY, names="adapters lora lora_path"),
    "skip_special_tokens": RefusedField("special tokens are not text", (True,)),
    "include_stop_str_in_output": RefusedField("an answer ends before the text that stops it", (False,)),
    "repetition_detection": RefusedField("an answer ends by itself, at a stop or at its limit", EMPTY),
    "t_max_predict_ms": RefusedField("it is the header X-Splitinfer-Timeout", (0, -1)),
    "truncate_prompt_tokens": RefusedField("a prompt is taken as it is", (-1,)),
    **_named("thinking_budget", -1, names="reasoning_budget thinking_budget_tokens thinking_token_budget"),
    **_named("thinking_budget", -1, names="reasoning_budget_tokens"),
    **_all(_NO_SAMPLER, 0, names="no_repeat_ngram_size top_a epsilon_cutoff eta_cutoff smoothing_factor"),
    **_all(_NO_SAMPLER, 1, names="guidance_scale encoder_repetition_penalty num_beams"),
}
TEMPLATE: Table = {
    **_all("the model has its own", "", names="chat_template template"),
    "documents": RefusedField("give them as messages", EMPTY),
    "mm_processor_kwargs": RefusedField("the model's own processor says how pictures are read", EMPTY),
    **_all("pictures are parts of messages", *EMPTY, names="image_data images"),
}
"""Fields of a chat that becomes tokens or text."""
COUNTED: Table = {
    # Another prompt.
    **TEMPLATE,
    **_all("give a message of the role system, or a response's instructions", "", names="system instructions"),
    "functions": RefusedField("it is deprecated; give tools", EMPTY),
    "personality": RefusedField("the model has none; give instructions"),
    "prompt_embeds": RefusedField("a prompt is text or token ids", EMPTY),
    "previous_input_messages": RefusedField(_STATELESS, EMPTY),
    "add_special_tokens": RefusedField("the model's template always writes its own", (False,)),
    "add_generation_prompt": RefusedField("the prompt always ends where the answer begins", (True,)),
    "continue_final_message": RefusedField("chats go on, and messages where the last one is the assistant's", (False,)),
    "echo": RefusedField("a chat has no text that could be repeated", (False,)),
    "prompt_logprobs": RefusedField("completions have them"),
    "suffix": RefusedField("give it to /v1/completions", ("",)),
    # Things that are stored or run elsewhere.
    **_all(_STATELESS, *EMPTY, names="previous_response_id conversation prompt context"),
    "container": RefusedField("nothing is run here"),
    "mcp_servers": RefusedField("nothing is run here", EMPTY),
    "web_search_options": RefusedField("the server runs no searches"),
    # This makes Anthropic's own helpers send whole conversations (anthropic 2.12.0, ``lib/threads``, recovers_from).
    "thread": RefusedField(
        f"{_STATELESS} as messages", details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    ),
}
"""Fields of requests that count a prompt's tokens. Fields about the answer are ignored there."""
REFUSED: Table = {
    **_SAMPLING,
    **COUNTED,
    # Another answer.
    "include_reasoning": RefusedField("reasoning is told apart, and may be left unread", (True,)),
    "reasoning_format": RefusedField("reasoning is told apart, as reasoning_content", ("", "auto", "deepseek")),
    "logprob_token_ids": RefusedField("logprobs are of the likeliest tokens", EMPTY),
    "modalities": RefusedField("answers are text", ([], ["text"])),
    "n": RefusedField("a request of this API has one answer", (1,)),
    **_named("n", 1, names="n_cmpl"),
    "best_of": RefusedField("answers are not ranked", (1,)),
    "guided_whitespace_pattern": RefusedField(_NO_BLANKS, EMPTY),
    # Other names.
    **_named("repetition_penalty", 0, 1, names="repeat_penalty"),
    **_named("stop", *EMPTY, names="stop_sequences"),
    **_named("max_tokens", -1, names="max_output_tokens n_predict max_new_tokens"),
    **_named("max_output_tokens", -1, names="max_tokens max_completion_tokens"),
    **_named("enable_thinking, or the API's own field", names="think thinking"),
    **_all(_FORM, *EMPTY, names="format grammar json_schema structured_outputs regex ebnf guided_json guided_regex"),
    **_all(_FORM, *EMPTY, names="guided_choice guided_grammar"),
    **_named("text.format, or output_config.format of messages", {"type": "text"}, names="response_format"),
    "text": RefusedField("its name here is response_format", ({}, {"format": {"type": "text"}})),
    "options": RefusedField("give its fields in the request itself", is_neutral=_has_no_sampling),
}
"""Fields of requests for an answer."""

COMPLETIONS: Table = {
    **REFUSED,
    "add_special_tokens": RefusedField("the tokenizer always adds its own", (True,)),
}
INFILL: Table = {
    **{name: why for name, why in REFUSED.items() if name not in ("samplers", "n_indent", "t_max_predict_ms")},
    **_named("n_predict", -1, names="max_tokens max_completion_tokens max_output_tokens"),
}
OLLAMA_OPTIONS: Table = _SAMPLING
"""Fields of ``options`` of Ollama's API."""

# Fields of objects in requests.
STRUCTURED: Table = {
    "structural_tag": RefusedField("give tools, or a grammar"),
    "whitespace_pattern": RefusedField(_NO_BLANKS, EMPTY),
    "disable_additional_properties": RefusedField('say "additionalProperties": false in the schema', (False,)),
}
REASONING: Table = {"mode": RefusedField("there is one mode, standard", ("standard",))}
CITED: Table = {"citations": RefusedField("answers do not cite", ({}, {"enabled": False}))}
OUTPUT: Table = {"task_budget": RefusedField("the model is not told how many tokens are left")}
