"""NVIDIA's GPUs on Linux: the driver, who computes there, memory that others hold, heat."""

from collections.abc import Iterator

from splitinfer.doctor.findings.finding import Finding, Seen, Severity
from splitinfer.doctor.parsing.nvidia import Gpu, gpus

AREA = "gpu"
_MUCH = 0.5  # of its memory


def findings(seen: Seen) -> Iterator[Finding]:
    """Findings on NVIDIA's GPUs; none where there is no nvidia-smi."""
    output = seen.outputs.get("nvidia")
    if output is None or (output.text is None and output.why.startswith("there is no")):
        return
    found = gpus(output.text or "")
    if not found:
        why = " ".join((output.text or output.why).split())[:200]
        text = f"nvidia-smi finds no GPU: {why}"
        yield Finding(AREA, Severity.PROBLEM, text, "install or reload the driver, or start the machine anew")
        return
    if not seen.on_gpu:
        text = f"there is a GPU ({found[0].name}), and this MLX computes on the processor"
        yield Finding(AREA, Severity.WARNING, text, "pip install 'mlx[cuda13]'")
    for number, gpu in enumerate(found):
        yield from _gpu(number, gpu)


def _gpu(number: int, gpu: Gpu) -> Iterator[Finding]:
    if gpu.memory and gpu.used is not None and gpu.used > _MUCH * gpu.memory:
        text = f"{gpu.used} MiB of GPU {number}'s {gpu.memory} MiB are taken ({gpu.name})"
        yield Finding(AREA, Severity.WARNING, text, "nvidia-smi shows by whom; end what you do not need")
    if gpu.is_throttled:
        text = f"heat slows GPU {number} ({gpu.name})"
        yield Finding(AREA, Severity.WARNING, text, "let it cool, and free its vents")
