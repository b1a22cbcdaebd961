"""`splitinfer serve --also`: models that share a worker and a machine take turns, whoever asks for them and whatever
dies meanwhile."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from campaigns.serving import LOCAL, restarted_worker
from processes import write_layout
from test_serve import serving

from splitinfer.demo import DEMO_MODELS

PROMPT, NUM_TOKENS = "Once upon a time", 12
CHAT = "/v1/completions"


def asked(client: httpx.Client, model: str, num: int = NUM_TOKENS) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": num, "temperature": 0}
    return client.post(CHAT, json=body, headers={"X-Splitinfer-Timeout": "90"})


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_two_layouts_take_turns_on_one_worker(tmp_path: Path):
    with restarted_worker() as worker:
        one = write_layout(tmp_path, [worker.address], "demo", 12)
        other = write_layout(tmp_path, [worker.address], str(DEMO_MODELS["demo-draft"]), 2)
        with serving("serve", "--port", "0", "--layout", str(one), "--also", f"small={other}") as (running, client):
            first, small, again = (text(asked(client, name, 4)) for name in ("demo", "small", "demo"))
            assert first == again != small
            assert "small is unloaded" in running.err


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_requests_change_the_model_at_random(seed: int, tmp_path: Path):
    """Four clients, three models, of which two share a worker that is killed now and then: each answer is the model's
    own or an error with its reason, all models answer in the end, and memory does not grow."""
    rng, lock, errors = random.Random(seed), threading.Lock(), Counter[int]()
    with restarted_worker() as worker:
        layouts = {
            "demo": write_layout(tmp_path, [worker.address], "demo", 12),
            "twin": write_layout(tmp_path, [LOCAL], "demo", 12),
            "small": write_layout(tmp_path, [worker.address], str(DEMO_MODELS["demo-draft"]), 2),
        }
        also = [word for name in ("twin", "small") for word in ("--also", f"{name}={layouts[name]}")]
        more = ("--max-loaded", str(rng.choice([1, 2])), "--ttl", "2", "--rejoin-timeout", "2", "--kv-gb", "0.2")
        with serving("serve", "--port", "0", "--layout", str(layouts["demo"]), *also, *more) as (running, client):
            right = {name: text(asked(client, name)) for name in layouts}

            def ask(nth: int) -> None:
                with lock:
                    name, kills = rng.choice(list(layouts)), nth % 50 == 25
                    if kills:
                        worker.kill()
                        worker.start_again()
                said = asked(client, name)
                if said.status_code == 200:
                    assert text(said) == right[name]
                else:
                    assert said.json()["error"]["message"], said.text
                    errors[said.status_code] += 1

            held = []
            with ThreadPoolExecutor(4) as pool:
                for block in range(4):
                    list(pool.map(ask, range(block * 50, block * 50 + 50)))
                    held.append(running.process.memory_info().rss)
            for name in layouts:
                assert text(asked(client, name)) == right[name]
            assert set(errors) <= {503}, running.err
            assert sum(errors.values()) <= 40, f"{errors}: {running.err[-3000:]}"
            assert held[-1] - held[1] < 60e6, [f"{each / 1e6:.0f} MB" for each in held]
