"""One of each message, with a value in every field, and accidents to their bytes."""

import math
import random

from splitinfer.common.fingerprint import FileFingerprint, Fingerprint
from splitinfer.core.codecs import Packing
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.core.picture import Picture
from splitinfer.core.plan import (
    Fetch,
    NewSequence,
    SampledSlice,
    SampledToken,
    Save,
    Slice,
    StageFigures,
    StepPlan,
    TensorSpec,
)
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.wire import messages
from splitinfer.wire.messages import Message
from splitinfer.wire.steps import packed

FIGURES = StageFigures(1, 1.5, 2.25, 1.25, 512, 2.5, 64, 0.25, 7, 2, 0.5, (3,), (b"key",), 0.125, 24, 18, 4096, 0.0625)
VERSIONS = messages.Versions(1, "0.1.0", "0.32.4", "0.32.2")
PARAMS = SamplingParams(
    9, 0.5, 0.75, 40, 0.25, 1.5, 2**64 - 1, ("\n", "é"), (2,), True, 3, 0.5, -0.5, ((7, -1.5),), None, 4, 5, 2
)
PICTURE = Picture(1, b"picture", (9, 9, 9, 9), (2, 2), True)
SAMPLED = SampledSlice(
    4, (SampledToken(9, -0.5, ((9, -0.5), (1, -2.0))),), (3, 5), (SampledToken(8, -1.0, ((8, -1.0),)),)
)
PLAN = StepPlan(
    step=3,
    new=(NewSequence(4, PARAMS, 9, (2,), (1, 2, 3), 5, (PICTURE,), 6),),
    slices=(Slice(4, 3, (70_000, 5), 1, scored=(5,)), Slice(1, 0, (1,), 0), Slice(2, 7, (4, 5, 6), 3, 3, 2)),
    freed=(0, 7),
    saves=(Save(5, 1, 0, 256), Save(6, 1, 256, 258, b"parent", (8, 9))),
    dropped=(3,),
    fetches=(Fetch(7, b"key", 0, 256),),
    erased=(b"old",),
    retained=(8,),
)
EXAMPLES: dict[str, Message] = {
    type(message).__name__.lower(): message
    for message in (
        messages.Hello("coordinator", "studio", "5f3a", VERSIONS, "ab" * 32),
        messages.Welcome("mini", VERSIONS, "gpu", 12 * 10**9),
        messages.Refuse("it is busy"),
        messages.Profile("owner/name", "auto", "k8v4", again=True),
        messages.Profiled("{}"),
        messages.Load(
            model="owner/name",
            dtype="auto",
            stage=1,
            bounds=(0, 20, 32),
            fingerprint=Fingerprint("c0", {"model.safetensors": FileFingerprint(10**10, "t", "s")}, "abc"),
            vocab_size=151_643,
            kv_tokens=8192,
            kv_root=b"root",
            kv_format="k8v4",
            float32_head=True,
            max_tokens=32_768,
            peers=(messages.Peer("mini", "tcp://10.0.0.3:5577", "cd" * 32),),
            reader_keys=("cd" * 32,),
            drafter="owner/drafter",
            drafter_fingerprint=Fingerprint("c1", {}),
            sees=True,
            mlx_vlm="0.3",
            half=messages.Half(1, "jaccl", "rdma_en5", "10.0.0.3", "10.0.0.2", insecure=True),
            drafter_dtype="float32",
            experts_bytes=5 * 10**9,
        ),
        messages.Progress("download", 5, 10, "model.safetensors"),
        messages.Ready(
            1,
            10**10,
            4096,
            512,
            2**20,
            10**9,
            None,
            True,
            (b"key", b"another"),
            TensorSpec("bfloat16", (4096,)),
            "gpu",
            2e-5,
        ),
        messages.Connect(messages.NextStage("rdma://10.0.0.3:5577?backend=ring", "", "tcp://10.0.0.3:5577"), "int8"),
        messages.Connected("tcp in place of rdma: no cable"),
        messages.Probe(messages.NextStage("tcp://10.0.0.3:5577", "ab" * 32)),
        messages.Probed(LinkMeasurement(0.00025, 0.0005, 1.1e9, math.inf), "tcp in place of rdma: no cable"),
        messages.Shown((32, 48), "{}"),
        messages.Plan(PLAN, waits=False),
        messages.Rows(
            *(3, TensorSpec("bfloat16", (6, 4096)), (packed(FIGURES),)),
            *(Packing("int8", ((0, 2), (4, 5))), ((2, 0), (2, 2))),
        ),
        messages.Result(3, (SAMPLED,), (packed(FIGURES),)),
        messages.Fault("the disk is gone", False, True, lost_rank=True),
        messages.AskManifest("3f" * 16, "owner/name"),
        messages.TellManifest(),
        messages.AskRanges((messages.Range("config.json", 0, 9), messages.Range("model.safetensors", 4096, 8192))),
        messages.TellRange(messages.Range("model.safetensors", 4096, 8192), 0xFFFF0001),
        messages.Spawn("both/1"),
        messages.Spawned(40_123),
        messages.Gather(b"10.0.0.3:5"),
        messages.Meet(messages.Half(1, "jaccl", "rdma_en5", "10.0.0.3", "10.0.0.2", insecure=True)),
        messages.Met(((8192, 2e-5), (2**20, 3e-4))),
        messages.Digest(32, 0xFFFF0001, 0.75),
        messages.Unavailable("a model with these weights is not here"),
    )
}


def mutate(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to four small accidents."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at : at + chance.randint(1, 8)]
            case 2:
                out[at:at] = chance.randbytes(chance.randint(1, 8))
            case 3 if at < len(out):
                out[at] = chance.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
            case _:
                out[at:at] = out[: chance.randint(0, 16)]
    return bytes(out)
