"""A client that gives up while its prompt is read, and sends it again: what is computed twice?

    python tests/server/campaigns/retries.py                    # 20 times, 4,000 tokens, 8 other streams
    python tests/server/campaigns/retries.py --kv-mb 20         # with little memory for KV
    python tests/server/campaigns/retries.py --accelerator two-small

The prompt is given up at a random moment of its reading, by closing its connection, and sent again by a new one. In the
end it is answered, and the answer is that of a server that was never disturbed. Exit code 1: more than one chunk was
computed twice for one retry, or the answer is another.
"""

import argparse
import os
import random
import threading
import time
from contextlib import suppress

from served import Served, read, served, text_of

ANSWER = 16  # tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20)
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
    others = [threading.Thread(target=keep_asking, args=(here, i), daemon=True) for i in range(given.streams)]
    for thread in others:
        thread.start()
    chance, began = random.Random(given.seed), time.monotonic()
    here.answer(text_of("another", given.tokens), 1)
    patience = time.monotonic() - began
    prompt = text_of(f"retried {given.seed}", given.tokens)
    done, twice, moments = 0, [], []
    for number in range(given.times):
        before = find(here, len(here.sequences))
        with here.ask(prompt, ANSWER):
            sequence = wait_for(here, before, given.tokens)
            # What is left of it takes its part of the time, so that every try is given up while it is read.
            time.sleep(chance.random() * patience * max(0.0, 1 - done / given.tokens) * 0.8)
        wait_until_over(sequence)
        cached = sequence.num_cached or 0 if sequence.num_scheduled else done
        twice.append(max(0, done - cached))
        done = max(done, sequence.num_scheduled)
        moments.append(sequence.num_scheduled)
        if sequence.num_generated:
            print(f"try {number + 1} was answered before it was given up", flush=True)
            break
    answer, usage = here.answer(prompt, ANSWER)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    twice.append(max(0, min(done, given.tokens - 1) - cached))
    right, _ = alone(here, prompt)
    print(f"given up after {moments} tokens; computed twice: {twice}, in all {sum(twice)} of {given.tokens}")
    print(f"the last try began with {cached} tokens; its answer is {'right' if answer == right else 'ANOTHER'}")
    return int(max(twice) > given.chunk or answer != right)


def find(here: Served, at: int) -> int:
    return at


def wait_for(here: Served, before: int, num_tokens: int):  # noqa: ANN201
    """The sequence of the prompt that was just sent."""
    while True:
        for sequence in here.sequences[before:]:
            if sequence.num_prompt_tokens >= num_tokens:
                return sequence
        time.sleep(0.001)


def wait_until_over(sequence) -> None:  # noqa: ANN001
    while sequence.finish_reason is None:
        time.sleep(0.001)


def alone(here: Served, prompt: str) -> tuple[str, object]:
    """The answer of the library, from tokens that were not in the cache."""
    with served(here.llm.context_length, prefix_cache=False) as other:
        return other.answer(prompt, ANSWER)


def keep_asking(here: Served, number: int) -> None:
    """A stream after the other, until the server is closed."""
    with suppress(OSError):
        for i in range(10**6):
            with here.ask(text_of(f"stream {number} {i}", 40), 200) as connection:
                read(connection)


if __name__ == "__main__":
    raise SystemExit(main())
