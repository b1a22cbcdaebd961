"""A prompt of 12,000 tokens over HTTP, on two processes, beside plain mlx-lm: the same answer.

    python -m tests.campaigns.long_prompt
    python -m tests.campaigns.long_prompt --tokens 20000 --answer 64

The context is what the stages have room for, as with `splitinfer serve`. Exit code 1: the answers differ.
"""

import argparse
import time
from pathlib import Path

from .served import served, text_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--answer", type=int, default=32)
    given = parser.parse_args()
    text = text_of("long", given.tokens)
    with served(context=given.tokens + given.answer + 8) as here:
        began = time.monotonic()
        answer, usage = here.answer(text, given.answer)
        seconds, began = time.monotonic() - began, time.monotonic()
        _, warm = here.answer(text, given.answer)
        again = time.monotonic() - began
        folder, prompt = Path(str(here.llm.layout.model)), here.llm.encode_chat([{"role": "user", "content": text}])
        decode = here.llm.decode
    right = decode(by_mlx_lm(folder, prompt, given.answer))
    print(f"{usage['prompt_tokens']:,} tokens in {seconds:.1f} s, again in {again:.1f} s with")
    print(
        f"{warm['prompt_tokens_details']['cached_tokens']:,} cached; {'as by mlx-lm' if answer == right else 'ANOTHER'}"
    )
    return int(answer != right)


def by_mlx_lm(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of plain mlx-lm."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    steps = generate_step(mx.array(prompt), model, max_tokens=num_tokens)
    return [int(token) for token, _ in steps]


if __name__ == "__main__":
    raise SystemExit(main())
