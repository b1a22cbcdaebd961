#!/usr/bin/env bash
# llguidance 1.9.1: in {"enum": [0.5, 1.5, 0.25], "multipleOf": 0.25} every value is a multiple of 0.25, but only 0.25 can be
# written. Alone, the enum writes 0.5 and the step 0.50, and together no text is both.
source "$(dirname "$0")/_python" llguidance==1.9.1
"$folder/bin/python" - <<'PYTHON'
import json, sys
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def admits(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


enum, step = {"enum": [0.5, 1.5, 0.25]}, {"type": "number", "multipleOf": 0.25}
seen = {text: [admits(each, text) for each in (enum, step, {**enum, **step})] for text in ("0.5", "0.50", "1.5", "0.25")}
print("expected: 0.5, 1.5 and 0.25 by all three: the enum, the step, both")
print(f"seen:     {seen}")
sys.exit([seen["0.5"][2], seen["0.50"][2], seen["1.5"][2], seen["0.25"][2]] != [False, False, False, True])
PYTHON
