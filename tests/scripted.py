"""A model whose weights are a script: it calls the tools that it is offered, and then says so.

A random model calls no tool, and what a client does with a call cannot be seen without one. This one is a Llama whose
layers add nothing, so that a token's successor depends on the token alone: the head has, for each piece of the script,
the embedding of the piece before it. Everything else is real: the chat template, a prompt of any length, its chunks,
stages, KV, sampling, detokenizing, and the parser of calls. The chat template chooses where the script begins: by the
first of the known tools that is offered, and by how many results of tools there are.

    <|bash 0|> -> "Let me " -> "look." -> "<tool_" -> "call>\\n" -> ... -> <|/bash 0|>   first answer: a call
    <|bash 1|> -> "It wor" -> "ked." -> <|/bash 1|>                                    once the result is there
    anything else -> the words of the plain answer

Texts of the script are tokens of their own, which no text is encoded to, so that two places of a script never share a
token; of other texts a token is a byte, or a part of a word that is common in a text that ``save`` gets.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS = 128, 2  # small, because agents' prompts are long
CONTEXT = 131072
PLAIN = "plain"
"""The script of requests without a known tool."""
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_PIECE = 6  # characters, at least
_LEARNT = 4000  # tokens of a common text
_SURE = 4.0  # logits of a successor are 11 times that, those of other tokens about that

Scripts = Mapping[str, Sequence[str]]
"""For a tool's name, or ``PLAIN``: the answers after 0, 1, ... results of tools; the last one also after more."""

_TEMPLATE = """\
{%- set ns = namespace(script='PLAIN', called=0) -%}
{%- for tool in tools or [] -%}
{{- tool | tojson }}\n
{%- if ns.script == 'PLAIN' and tool.function.name in SCRIPTS -%}{%- set ns.script = tool.function.name -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
<|{{ message.role }}|>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{- message.content or '' -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set tool_call = tool_call.function -%}
<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>
{%- endfor -%}
{%- if message.role == 'tool' -%}{%- set ns.called = ns.called + 1 -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- set last = SCRIPTS[ns.script] -%}
<|{{ ns.script }} {{ ns.called if ns.called < last else last }}|>
{%- endif -%}
"""


def call(name: str, thinking: str = "", text: str = "", **arguments: Any) -> str:
    thought = f"<think>{thinking}</think>" if thinking else ""
    return f"{thought}{text}<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def save(folder: Path, scripts: Scripts, *, seed: int = 0, common: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    scripts = {PLAIN: ["I have no tool for that."], **scripts}
    chains = _chains(scripts)
    tokenizer = _tokenizer(chains, _merges(common) if common else [])
    ids = tokenizer.get_vocab()
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(ids, chains, seed), metadata={"format": "mlx"})
    ends = [_end(start) for start in chains]
    _write(folder / "config.json", _config(len(ids), [ids[end] for end in ends]))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    last = {name: len(answers) - 1 for name, answers in scripts.items()}
    template = _TEMPLATE.replace("'PLAIN'", repr(PLAIN)).replace("SCRIPTS", json.dumps(last))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0], "model_max_length": CONTEXT}
    _write(folder / "tokenizer_config.json", {**named, "chat_template": template})
    return folder


def _chains(scripts: Scripts) -> dict[str, list[str]]:
    """For each token at which an answer begins, the pieces of its text; no piece is in two places."""
    used = set[str]()
    return {
        f"<|{name} {number}|>": _pieces(answer, used)
        for name, answers in scripts.items()
        for number, answer in enumerate(answers)
    }


def _pieces(text: str, used: set[str]) -> list[str]:
    """A text as pieces that are not ``used``, which they are then. One that is grows at its end, or, at the end of the
    text, at its beginning."""
    pieces, at = list[str](), 0
    while at < len(text):
        end = at + _PIECE
        while end < len(text) and text[at:end] in used:
            end += 1
        piece, at = text[at:end], end
        while piece in used:
            piece = pieces.pop() + piece
        pieces.append(piece)
        used.add(piece)
    return pieces


def _merges(text: str) -> list[tuple[str, str]]:
    """The commonest pairs of tokens in a text, the first ones of bytes."""
    trained, alphabet = Tokenizer(models.BPE()), sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=_LEARNT, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([text], trainer)
    return [(left, right) for left, right in json.loads(trained.to_str())["model"]["merges"]]


def _tokenizer(chains: Mapping[str, Sequence[str]], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    pieces = dict.fromkeys(_written(piece) for pieces in chains.values() for piece in pieces)
    kept = list[tuple[str, str]]()
    for left, right in merges:
        if left in words and right in words and left + right not in pieces:
            words[left + right] = None
            kept.append((left, right))
    vocab = {word: number for number, word in enumerate([*words, *(piece for piece in pieces if piece not in words)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=kept))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    edges = (edge for start in chains for edge in (start, _end(start)))
    tokenizer.add_special_tokens([AddedToken(edge, special=True) for edge in edges])
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in _MARKERS])
    return tokenizer


def _weights(ids: Mapping[str, int], chains: Mapping[str, Sequence[str]], seed: int) -> dict[str, mx.array]:
    mx.random.seed(seed)
    common = mx.random.normal((HIDDEN,))
    own = mx.random.normal((len(ids), HIDDEN))
    successors = _successors(ids, chains)
    scripted = mx.zeros((len(ids), 1))
    scripted[mx.array(list(successors))] = 1.0
    embedding = scripted * own + (1 - scripted) * common
    directions = embedding / mx.linalg.norm(embedding, axis=1, keepdims=True)
    head = mx.zeros((len(ids), HIDDEN))
    head[mx.array(list(successors.values()))] = _SURE * directions[mx.array(list(successors))]
    head[_first_plain(ids, chains)] += _SURE * common / mx.linalg.norm(common)
    return {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": mx.ones((HIDDEN,))} | {
        name: array for layer in range(LAYERS) for name, array in _layer(layer).items()
    }


def _successors(ids: Mapping[str, int], chains: Mapping[str, Sequence[str]]) -> dict[int, int]:
    """The token behind each token of the script."""
    found: dict[int, int] = {}
    for start, pieces in chains.items():
        path = [ids[start], *(ids[_written(piece)] for piece in pieces), ids[_end(start)]]
        found |= dict(pairwise(path))
    return found


def _end(start: str) -> str:
    """The token that ends the answer which begins at another."""
    return start.replace("<|", "<|/")


def _first_plain(ids: Mapping[str, int], chains: Mapping[str, Sequence[str]]) -> int:
    return ids[_written(chains[f"<|{PLAIN} 0|>"][0])]


def _written(piece: str) -> str:
    """A piece in the alphabet of bytes that vocabularies are written in."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return "".join(part for part, _ in level.pre_tokenize_str(piece))


def _layer(number: int) -> dict[str, mx.array]:
    """A layer that attends and computes, and whose outcome counts nothing."""
    kv, wide = HIDDEN // 2, 2 * HIDDEN
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (wide, HIDDEN), "mlp.up_proj": (wide, HIDDEN),
        "mlp.down_proj": (HIDDEN, wide),
    }  # fmt: skip
    made = {
        f"model.layers.{number}.{name}.weight": mx.zeros(shape)
        if name in ("self_attn.o_proj", "mlp.down_proj")
        else mx.random.normal(shape) / HIDDEN**0.5
        for name, shape in shapes.items()
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return made | {f"model.layers.{number}.{name}.weight": mx.ones((HIDDEN,)) for name in norms}


def _config(vocab: int, ends: Sequence[int]) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": vocab,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "torch_dtype": "float32", "eos_token_id": list(ends),
    }  # fmt: skip


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
