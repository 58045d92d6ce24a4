# SPDX-License-Identifier: Apache-2.0
"""Memory and time of FedQUIT's token loss, plain and chunked, over the size of the vocabulary.

    python benchmarks/chunked_loss.py [positions] [features]
    python benchmarks/chunked_loss.py logits

Each case runs in a process of its own, on one thread: a loss with its gradients for hidden states and head, in float32.
What is printed is the growth of the process's peak memory over what inputs take, and the time. The gradient of the
head, as large as the head itself, is part of it; `head frozen` is the case of LoRA. With `logits` the logits of both
models are there already, as in `fedquit.forget`: (4, 256, 50,257) numbers, at once and in chunks.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch

from fedquit.core.projection import Projection
from fedquit.distill.chunked import LARGE, chunked_distillation_loss, distillation_in_chunks
from fedquit.distill.losses import Rule, of_examples

RULE = Rule("min", "kl", v=0.0, tau=1.0, k=5)
VOCABULARIES = (1_000, 8_000, 50_257, 128_000)


def peak_mb() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(kind: str, vocabulary: int, positions: int, features: int, *, frozen: bool) -> tuple[float, float]:
    """Return the growth of the peak in MB, and the seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(4, positions // 4, features, requires_grad=True)
    known = torch.randn(4, positions // 4, features)
    head = torch.randn(vocabulary, features) / features**0.5
    weight = head.clone().requires_grad_(not frozen)
    y = torch.randint(vocabulary, (4, positions // 4))
    u = torch.zeros(y.shape)
    before = peak_mb()
    start = time.perf_counter()
    if kind == "chunked":
        losses = chunked_distillation_loss(Projection(hidden, weight), Projection(known, head), y, u, RULE)
    else:
        logits = Projection(hidden, weight).logits
        with torch.no_grad():
            target = Projection(known, head).logits
        losses = of_examples(RULE.losses(logits, target, y, u))
    torch.autograd.grad(losses.mean(), [hidden] if frozen else [hidden, weight])
    return peak_mb() - before, time.perf_counter() - start


def measure_on_logits(kind: str) -> tuple[float, float]:
    """Return the growth of the peak in MB, and the seconds, of the loss and its gradient for given logits."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits = torch.randn(4, 256, 50_257, requires_grad=True)
    target = torch.randn(4, 256, 50_257)
    y = torch.randint(50_257, (4, 256))
    large = LARGE if kind == "chunked" else logits.numel()
    before = peak_mb()
    start = time.perf_counter()
    losses = distillation_in_chunks(logits, target, y, torch.zeros(y.shape), RULE, large=large)
    torch.autograd.grad(losses.mean(), [logits])
    return peak_mb() - before, time.perf_counter() - start


def case(*words: str) -> str:
    """Return what a process of its own prints of one case."""
    done = subprocess.run([sys.executable, __file__, "case", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "out of memory"


def main() -> None:
    """Print a table."""
    if sys.argv[1:2] == ["logits"]:
        print("4 x 256 positions, 50,257 tokens, float32, one thread: MB, s beside the logits of both models")
        for kind in ("plain", "chunked"):
            print(f"{kind}: {case(kind)}")
        return
    words = [int(word) for word in sys.argv[1:3]]
    positions = words[0] if words else 2048
    features = words[1] if len(words) > 1 else 64
    print(f"{positions} positions, {features} features, float32, one thread")
    print("| tokens | plain: MB, s | chunked: MB, s | chunked, head frozen: MB, s | head: MB |")
    print("|---:|---:|---:|---:|---:|")
    for vocabulary in VOCABULARIES:
        cells = []
        for kind, frozen in (("plain", False), ("chunked", False), ("chunked", True)):
            cells.append(case(kind, str(vocabulary), str(positions), str(features), str(int(frozen))))
        size = vocabulary * features * 4 / 2**20
        print(f"| {vocabulary:,} | {' | '.join(cells)} | {size:.0f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"] and len(sys.argv) == 3:
        print("{:,.0f}, {:.2f}".format(*measure_on_logits(sys.argv[2])))
    elif sys.argv[1:2] == ["case"]:
        kind, vocabulary, positions, features, frozen = sys.argv[2:]
        grown, seconds = measure(kind, int(vocabulary), int(positions), int(features), frozen=frozen == "1")
        print(f"{grown:,.0f}, {seconds:.2f}")
    else:
        main()
