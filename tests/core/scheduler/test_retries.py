"""A client that gives up while its prompt is read, and sends it again, goes on where it was.

Clients give up after a time without a token, and send the same prompt again. A server that throws away what it has read
by then never finishes a prompt that takes longer than their patience.
"""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from toy import VOCAB, House, blocks, small

CHUNK = 8  # tokens
PROMPT = 80  # tokens: 20 blocks


def some_steps(house: House, pick: Random, most: int) -> None:
    """Steps and results, as they come."""
    for _ in range(pick.randint(0, most)):
        if house.step() is None and not house.toy.under_way:
            return
        while house.toy.under_way and pick.random() < 0.6:
            house.deliver()


def given_up(house: House, pick: Random, prompt: list[int], times: int) -> int:
    """Send a prompt again and again, give it up at some moment of its reading each time, and read it in the end; the
    tokens of it that were computed twice."""
    seq_id = 0
    for _ in range(times):
        seq_id = house.add(prompt, max_tokens=3)
        some_steps(house, pick, 8)
        if house.sequences[seq_id].num_generated:
            break
        house.finish(seq_id)
        some_steps(house, pick, 1)
    if seq_id in house.cancelled or not times:
        seq_id = house.add(prompt, max_tokens=3)
    house.until(lambda: seq_id in house.reasons)
    computed = sum(house.toy.num_computed.get(i, 0) for i, each in house.prompts.items() if each == prompt)
    return computed - len(prompt) - len(house.generated[seq_id]) + 1


@given(
    st.randoms(use_true_random=False),
    st.booleans(),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([None, 150, 41, 30, 26, 22]),
)
def test_no_token_is_computed_twice_but_where_a_state_cannot_be_cut(
    pick: Random, whole_blocks: bool, others: int, in_flight: int, room: int | None
):
    """Up to 41 blocks there is no room for stored ones beside the prompt: these take its place when it is given up,
    and it takes theirs when it comes again. A state is taken over there, and not stored where it has gone on."""
    is_alone = room is not None and room < 100
    with small(block=4):
        kv = None if room is None else blocks(room)
        house = House(token_budget=CHUNK, max_running=6, max_in_flight=in_flight, whole_blocks=whole_blocks, kv=kv)
        for _ in range(0 if is_alone else others):
            house.add([pick.randrange(VOCAB) for _ in range(5)], max_tokens=40)
        prompt, times = [pick.randrange(VOCAB) for _ in range(PROMPT)], 6
        twice = given_up(house, pick, prompt, times)
        assert twice <= (times if not whole_blocks else CHUNK) or (is_alone and whole_blocks)
        house.check()
