# SPDX-License-Identifier: Apache-2.0
"""FedQUIT in plain PyTorch: Algorithms 1 and 2, every rule of the virtual teacher for one example, every divergence."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedquit.core import ClientId
from reference.plain import ADAM_EPS, Transcription, average
from reference.world import CLASSES, Step, Weights, net


class FedQUIT(Transcription):
    """Mora, Valerio, Bellavista, Passarella: Algorithm 1 at each leaving client, Algorithm 2 at the server."""

    def unlearn(self) -> None:
        in_parallel = self.options.get("order", "parallel") == "parallel"
        turns = [list(self.leaving)] if in_parallel else [[u] for u in self.leaving]
        for r, clients in enumerate(turns):
            self.enter("unlearn-0", r)
            self.ask()
            w_t = self.w
            self.w = average([self.algorithm_1(u, w_t) for u in clients])  # weights |D_u^forget| / N_U
            self.end_round()

    def algorithm_1(self, u: ClientId, w_t: Weights) -> tuple[Weights, int]:
        """The student starts as w_t and follows the virtual teacher, which is w_t with its true logit pushed down."""
        visit = self.visit(u, "forget", epochs=self.options["epochs"], batch_size=self.options["batch_size"])

        def loss(student: Weights, step: Step) -> Tensor:
            z_s = net(student, step.x)
            with torch.no_grad():
                z_g = net(w_t, step.x)
            examples = zip(z_g, step.y.tolist(), step.u.tolist(), strict=True)
            p_virt = torch.stack([self.virtual_teacher(z, y, drawn) for z, y, drawn in examples])
            return self.divergence(p_virt, z_s.softmax(-1)).mean()

        return self.descend(visit, w_t, loss, self.new_optimizer), visit.examples

    def new_optimizer(self, weights: list[Tensor]) -> Optimizer:
        lr = self.options["lr"]
        name = self.options.get("optimizer", "adam")
        if name == "adamw":
            return AdamW(weights, lr=lr, eps=ADAM_EPS, weight_decay=0.004)  # Keras' default
        return SGD(weights, lr=lr) if name == "sgd" else Adam(weights, lr=lr, eps=ADAM_EPS)

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """Of the student's probabilities q from the teacher's p, for each example."""
        name = self.options.get("loss", "kl")
        if name == "ce":
            return -(p * q.log()).sum(-1)
        if name == "mse":
            return ((p - q) ** 2).sum(-1) / CLASSES
        if name == "cosine":
            return -(p * q).sum(-1) / ((p * p).sum(-1).sqrt() * (q * q).sum(-1).sqrt())
        return (p * (p.clamp_min(1e-300) / q).log()).sum(-1)  # 0 log 0 is 0

    def virtual_teacher(self, z: Tensor, y: int, u: float) -> Tensor:
        """The teacher's probabilities for one example: its logits z `(C,)`, its label, and a uniform number."""
        rule = self.options.get("teacher", "min")
        others = [c for c in range(CLASSES) if c != y]
        M = len(others)
        S = sum(math.exp(z[c]) for c in others)
        low = float(z.min())
        virtual = z.clone()
        virtual[y] = low
        ranked = sorted(others, key=lambda c: -float(z[c]))  # the best first
        if rule == "fixed":
            virtual[y] = self.options["v"]
        elif rule == "entropy":
            virtual[y] = sum(math.exp(z[c]) / S * float(z[c]) for c in others)
        elif rule == "temperature":
            tau = self.options["tau"]
            softened = sum(math.exp(z[c] / tau) for c in others)
            for c in others:
                virtual[c] = z[c] / tau + math.log(S) - math.log(softened)
        elif rule == "flatten":
            for c in others:
                virtual[c] = math.log(S) - math.log(M)
        elif rule == "topk":
            rest = ranked[self.options["k"] :]
            mass = sum(math.exp(z[c]) for c in rest)
            for c in rest:
                virtual[c] = math.log(mass) - math.log(len(rest))
        elif rule == "logit_ladder":
            slope = self._slope(S * math.exp(-low), M)
            for r, c in enumerate(ranked):
                virtual[c] = low + slope * (M - 1 - r)
        elif rule == "probability_ladder":
            p_y = math.exp(low) / (math.exp(low) + S)
            delta = 2 * (1 - (M + 1) * p_y) / (M * (M - 1))
            for r, c in enumerate(ranked):
                virtual[c] = math.log(math.exp(low) + S) + math.log(p_y + delta * (M - 1 - r))
        elif rule == "incompetent":
            return torch.full_like(z, 1 / CLASSES)
        elif rule == "random":
            one_hot = torch.zeros_like(z)
            one_hot[math.floor(u * CLASSES)] = 1.0
            return one_hot
        return virtual.softmax(-1)

    def _slope(self, target: float, M: int) -> float:
        """The slope at which 1 + e^s + … + e^((M-1) s) is the target, by bisection."""
        below, above = 0.0, 100.0
        for _ in range(200):
            middle = (below + above) / 2
            if sum(math.exp(middle * k) for k in range(M)) < target:
                below = middle
            else:
                above = middle
        return (below + above) / 2
