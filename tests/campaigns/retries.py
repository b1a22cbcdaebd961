"""A client that gives up while its prompt is read, and sends it again: what is computed twice?

    python -m tests.campaigns.retries                    # 20 prompts of 4,000 tokens, 8 other streams
    python -m tests.campaigns.retries --tries 4          # each given up four times
    python -m tests.campaigns.retries --kv-mb 6          # with little memory for KV
    python -m tests.campaigns.retries --accelerator two-small

Each prompt is given up at a random moment of its reading, by closing its connection, and sent again by a new one, which
is answered. Exit code 1: more than one chunk was computed twice, or an answer is another than that of a server that was
never disturbed.
"""

import argparse
import os
import random
import threading
import time
from contextlib import suppress

from splitinfer.core.sequence import Sequence

from .served import Served, read, served, text_of

ANSWER = 16  # tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--compared", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--kv-mb", type=float)
    parser.add_argument("--accelerator")
    given = parser.parse_args()
    if given.accelerator:
        os.environ["SPLITINFER_ACCELERATOR"] = given.accelerator
    kv = None if given.kv_mb is None else int(given.kv_mb * 1e6)
    with served(2 * given.tokens, token_budget=given.chunk, kv_bytes=kv) as here:
        return campaign(here, given)


def campaign(here: Served, given: argparse.Namespace) -> int:
    for i in range(given.streams):
        threading.Thread(target=keep_asking, args=(here, i), daemon=True).start()
    chance, twice, answers = random.Random(given.seed), list[int](), dict[str, str]()
    for number in range(given.prompts):
        prompt, done, moments = text_of(f"prompt {given.seed} {number}", given.tokens), 0, list[int]()
        for _ in range(given.tries):
            sequence = given_up(here, prompt, given.tokens, chance.randint(done, given.tokens - 1))
            done = max(done, sequence.num_scheduled)
            moments.append(sequence.num_scheduled)
        answers[prompt], usage = here.answer(prompt, ANSWER)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        twice.append(max(0, done - cached))
        print(f"given up after {moments} tokens, begun again with {cached}: {twice[-1]} computed twice", flush=True)
    wrong = sum(alone(here, prompt) != answer for prompt, answer in list(answers.items())[: given.compared])
    print(f"computed twice: {sum(twice)} tokens in all, at most {max(twice)}; chunks are of {given.chunk}")
    print(f"{wrong} of {min(given.compared, len(answers))} answers are others than undisturbed")
    return int(max(twice) > given.chunk or wrong > 0)


def given_up(here: Served, prompt: str, num_tokens: int, moment: int) -> Sequence:
    """Send a prompt and leave once so many of its tokens are planned; what became of it."""
    before = len(here.sequences)
    with here.ask(prompt, ANSWER):
        while (sequence := _newest(here, before, num_tokens)) is None or sequence.num_scheduled < moment:
            time.sleep(0.0005)
    while sequence.finish_reason is None:
        time.sleep(0.001)
    return sequence


def _newest(here: Served, before: int, num_tokens: int) -> Sequence | None:
    return next((one for one in here.sequences[before:] if one.num_prompt_tokens >= num_tokens), None)


def alone(here: Served, prompt: str) -> str:
    """The answer to a prompt that nothing is known of."""
    with served(here.llm.context_length, prefix_cache=False) as other:
        return other.answer(prompt, ANSWER)[0]


def keep_asking(here: Served, number: int) -> None:
    """A stream after the other, until the server is closed."""
    with suppress(OSError):
        for i in range(10**6):
            with here.ask(text_of(f"stream {number} {i}", 40), 200) as connection:
                read(connection)


if __name__ == "__main__":
    raise SystemExit(main())
