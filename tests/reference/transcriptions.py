# SPDX-License-Identifier: Apache-2.0
"""Every other method in plain PyTorch, as its paper tells it.

Where a paper and the port behind the table of FedQUIT's paper differ, both are here, as a class or an option each. To
add a method: a subclass of `Transcription` here, and an entry in `cases.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import SGD

from fedquit.core import SERVER, ClientId
from reference.plain import (
    EVERYBODY,
    Replies,
    Transcription,
    adam,
    average,
    cross_entropy,
    from_vector,
    learning,
    length,
    minus,
    random_label,
    rate,
    sgd,
    vector,
)
from reference.world import (
    EPOCHS,
    HEAD,
    LR,
    RECOVERY_ROUNDS,
    ROUNDS,
    SIZES,
    WEIGHT_DECAY,
    Part,
    Step,
    Visit,
    Weights,
    initial,
    net,
)

# The baselines.


class Natural(Transcription):
    """No unlearning: the client leaves, and training goes on."""

    def unlearn(self) -> None:
        pass


class Retrain(Transcription):
    """As many rounds as before, from the same start and the first learning rate on, without the forgotten data."""

    def unlearn(self) -> None:
        self.w = self.w0
        for t in range(ROUNDS):
            self.enter("unlearn-0", t)
            self.ask()
            self.w = average([self.learn(k, "retain", self.w, rate(t)) for k in self.staying])
            self.end_round()

    def recover(self) -> None:
        pass


class RapidRetraining(Transcription):
    """Liu et al. 2022: retraining with a diagonal second-order step: Adam's moments, without decay of any kind."""

    def unlearn(self) -> None:
        self.w = self.w0
        for t in range(ROUNDS // 2):
            self.enter("unlearn-0", t)
            self.ask()
            replies: Replies = []
            for k in self.staying:
                visit = self.visit(k, "retain", augmented=True)
                replies.append((self.local(visit), visit.examples))
            self.w = average(replies)
            self.end_round()

    def local(self, visit: Visit) -> Weights:
        return self.descend(visit, self.w, learning, adam(self.options["lr"]))


class AdaHessian(RapidRetraining):
    """The same with Yao et al.'s AdaHessian: the second moment is that of the Hessian's diagonal, by Hutchinson."""

    def local(self, visit: Visit) -> Weights:
        lr, beta1, beta2, eps = self.options["lr"], 0.9, 0.999, 1e-8
        signs = torch.Generator().manual_seed(visit.curvature_seed)
        w = dict(self.w)
        m = {n: torch.zeros_like(p) for n, p in w.items()}
        v = {n: torch.zeros_like(p) for n, p in w.items()}
        losses = []
        for t, step in enumerate(visit.steps, start=1):
            w = {n: p.detach().requires_grad_() for n, p in w.items()}
            loss = learning(w, step)
            g = torch.autograd.grad(loss, list(w.values()), create_graph=True)
            z = [(2 * torch.randint(2, p.shape, generator=signs) - 1).double() for p in w.values()]
            along = sum((g_i * z_i).sum() for g_i, z_i in zip(g, z, strict=True))
            assert isinstance(along, Tensor)
            Hz = torch.autograd.grad(along, list(w.values()))
            for (n, p), g_i, z_i, Hz_i in zip(list(w.items()), g, z, Hz, strict=True):
                m[n] = beta1 * m[n] + (1 - beta1) * g_i.detach()
                v[n] = beta2 * v[n] + (1 - beta2) * (z_i * Hz_i) ** 2
                w[n] = (p - lr * (m[n] / (1 - beta1**t)) / ((v[n] / (1 - beta2**t)).sqrt() + eps)).detach()
            losses.append(float(loss.detach()))
        self.send(visit, w, sum(losses) / len(losses))
        return w


# Methods that train at the leaving client.


class GradientAscent(Transcription):
    """The leaving clients climb their loss: momentum 0.9, the whole gradient clipped."""

    def unlearn(self) -> None:
        self.enter("unlearn-0", 0)
        self.ask()
        replies: Replies = []
        for u in self.leaving:
            visit = self.visit(u, "forget", epochs=self.options["epochs"], batch_size=self.options["batch_size"])
            climb = sgd(self.options["lr"], momentum=0.9)
            w_u = self.descend(visit, self.w, lambda w, step: -learning(w, step), climb, clip=self.options["clip"])
            replies.append((w_u, visit.examples))
        self.w = average(replies)
        self.end_round()


class FedUNRAN(Transcription):
    """Mora et al. 2024: the leaving clients learn labels that are drawn anew in every step, with Adam."""

    def unlearn(self) -> None:
        self.enter("unlearn-0", 0)
        self.ask()
        replies: Replies = []
        for u in self.leaving:
            visit = self.visit(u, "forget", epochs=self.options["epochs"], batch_size=self.options["batch_size"])

            def loss(w: Weights, step: Step) -> Tensor:
                return cross_entropy(net(w, step.x), random_label(step.u))

            replies.append((self.descend(visit, self.w, loss, adam(self.options["lr"])), visit.examples))
        self.w = average(replies)
        self.end_round()


class PGA(Transcription):
    """Halimi et al. 2022, as FedQUIT's port has it: plain distances, the gradient of each tensor clipped."""

    squared = False  # whether distances are measured squared
    random_models = 1
    halt = 6.0

    def unlearn(self) -> None:
        self.constraints: list[tuple[int, int, int]] = []  # for each client: steps planned, taken, projected
        self.enter("unlearn-0", 0)
        replies: Replies = []
        for u in self.leaving:
            draws = [self.server_seed() + i for i in range(self.random_models)]
            self.ask()
            replies.append(self.ascend(u, draws))
        self.w = average(replies)
        self.end_round()

    def share(self, u: ClientId) -> float:
        """The client's share in the mean of all: one of K, or that of its examples."""
        return SIZES[u] / sum(SIZES.values()) if self.options.get("weighted") else 1 / len(SIZES)

    def distance(self, a: Weights, b: Weights) -> float:
        return length(minus(a, b)) ** (2 if self.squared else 1)

    def clip(self, gradients: list[Tensor]) -> None:
        for tensor in gradients:
            torch.nn.utils.clip_grad_norm_([tensor], self.options["clip_tensor"])

    def ascend(self, u: ClientId, draws: Sequence[int]) -> tuple[Weights, int]:
        w_u = self.history[-1][1][u]  # its own last local model
        a = self.share(u)
        w_ref = {n: (p - a * w_u[n]) / (1 - a) for n, p in self.w.items()}
        delta = sum(self.distance(w_ref, initial(seed)) for seed in draws) / len(draws) / 3
        visit = self.visit(u, "forget", epochs=self.options["epochs"], batch_size=self.options["batch_size"])
        w = {n: p.clone().requires_grad_() for n, p in w_ref.items()}
        optimizer = SGD(list(w.values()), lr=self.options["lr"], momentum=0.9)
        taken = projected = 0
        for step in visit.steps:
            optimizer.zero_grad()
            (-learning(w, step)).backward()
            self.clip(list(w.values()))
            optimizer.step()
            taken += 1
            with torch.no_grad():
                if self.distance(w, w_ref) > delta:
                    away = minus(w, w_ref)
                    for n, p in w.items():
                        p.copy_(w_ref[n] + math.sqrt(delta) * away[n] / length(away))
                    projected += 1
                if self.distance(w, w_u) > self.options.get("halt", self.halt):
                    break
        self.constraints.append((len(visit.steps), taken, projected))
        w = {n: p.detach() for n, p in w.items()}
        self.send(visit, w, None)  # the package also evaluates the steps that are no longer taken
        return w, visit.examples


class PGAAuthors(PGA):
    """As the authors have it: squared distances, ten random models, the whole gradient clipped."""

    squared = True
    random_models = 10
    halt = 2.2

    def clip(self, gradients: list[Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(gradients, self.options["clip"])


# FedAU.


class FedAU(Transcription):
    """Gu et al. 2024 as FedQUIT's port has it: afterwards, a fresh head on the frozen body of the final model."""

    weight = 0.96

    def unlearn(self) -> None:
        self.enter("unlearn-0", 0)
        generator = torch.Generator().manual_seed(self.server_seed())
        fresh = {n: 0.01 * torch.randn(self.w[n].shape, generator=generator).double() for n in HEAD}  # N(0, 0.01^2)
        self.ask()
        heads = [self.train_head(u, fresh) for u in self.leaving]
        self.mix(heads)

    def train_head(self, u: ClientId, fresh: Weights) -> Weights:
        """Random labels, drawn in every step, for what is to be forgotten; of samples, the rest keeps its labels."""
        part: Part = "all" if self.samples else "forget"
        visit = self.visit(u, part, epochs=self.options["epochs"], batch_size=self.options["batch_size"])

        def loss(head: Weights, step: Step) -> Tensor:
            labels = torch.where(step.forget, random_label(step.u), step.y)
            return cross_entropy(net({**self.w, **head}, step.x), labels)

        return self.descend(visit, fresh, loss, sgd(rate(ROUNDS - 1), decay=WEIGHT_DECAY))

    def mix(self, heads: Sequence[Weights]) -> None:
        """W <- (1 - a) W + a / |U| * the sum of the auxiliary heads; the body stays."""
        a = self.weight
        self.w = dict(self.w)
        for n in HEAD:
            self.w[n] = (1 - a) * self.w[n] + a / len(heads) * torch.stack([head[n] for head in heads]).sum(0)
        self.end_round()


class FedAUDuring(FedAU):
    """As the authors have it: the leaving clients train the auxiliary head in all rounds of training."""

    weight = 0.9
    carry = 0.5  # for whole clients: W2 <- (W1 + W2) / 2 before each round

    def train(self) -> None:
        self.auxiliary: dict[ClientId, Weights] = {}
        others = [k for k in EVERYBODY if k not in self.leaving]
        for t in range(ROUNDS):
            self.enter("train", t)
            replies: Replies = []
            for group in sorted([list(self.leaving), others]):  # a question for each task, that of client 0 first
                self.ask()
                for k in group:
                    both = k in self.leaving
                    replies.append(self.learn_both(k, rate(t)) if both else self.learn(k, "all", self.w, rate(t)))
            self.w = average(replies)
            self.end_round()
        self.clock = ROUNDS

    def learn_both(self, u: ClientId, lr: float) -> tuple[Weights, int]:
        """CE(W1 h, y) + CE(W2 h, y2), with a fixed random label y2 for what is to be forgotten."""
        g = 1.0 if self.samples else self.carry
        visit = self.visit(u, "all", augmented=True)
        own = {n: self.w[n] for n in HEAD}
        last = self.auxiliary.get(u, own)
        start = {**self.w, **{f"W2 {n}": (1 - g) * own[n] + g * last[n] for n in HEAD}}

        def loss(w: Weights, step: Step) -> Tensor:
            model = {n: w[n] for n in self.w}
            y2 = torch.where(step.forget, random_label(step.fixed), step.y)
            second = net({**model, **{n: w[f"W2 {n}"] for n in HEAD}}, step.x)
            return cross_entropy(net(model, step.x), step.y) + cross_entropy(second, y2)

        def model_alone(w: Weights) -> Weights:  # the auxiliary head stays at home
            return {n: w[n] for n in self.w}

        w = self.descend(visit, start, loss, sgd(lr, decay=WEIGHT_DECAY), sent=model_alone)
        self.auxiliary[u] = {n: w[f"W2 {n}"] for n in HEAD}
        return model_alone(w), visit.examples

    def unlearn(self) -> None:
        self.enter("unlearn-0", 0)
        self.ask()
        for u in self.leaving:
            self.send(self.visit(u, "forget", epochs=0.0), self.auxiliary[u], None)
        self.mix([self.auxiliary[u] for u in self.leaving])


# Methods at the server.


class NoT(Transcription):
    """Khalil et al. 2025: the first layer's weights change their sign."""

    def unlearn(self) -> None:
        self.enter("unlearn-0", 0)
        self.w = {**self.w, "0.weight": -1 * self.w["0.weight"]}
        self.end_round()


class FUKD(Transcription):
    """Wu, Zhu, Mitra 2022: what the clients contributed is subtracted; the old model teaches on public data."""

    def unlearn(self) -> None:
        self.enter("unlearn-0", 0)
        w_T = self.w
        start = dict(w_T)
        n = sum(SIZES.values())
        for u in self.leaving:
            for w_t, replies in self.history:
                update = minus(replies[u], w_t)
                start = {name: p - SIZES[u] / n * update[name] for name, p in start.items()}
        T = 3.0
        self.ask()
        visit = self.visit(SERVER, "public", epochs=self.options["epochs"], batch_size=self.options["batch_size"])

        def loss(student: Weights, step: Step) -> Tensor:
            with torch.no_grad():
                p = (net(w_T, step.x) / T).softmax(-1)
            q = (net(student, step.x) / T).softmax(-1)
            return T**2 * (p * (p / q).log()).sum(-1).mean()

        self.w = self.descend(visit, start, loss, adam(self.options["lr"]))
        self.end_round()


# Methods of several rounds with those who stay.


class FedEraser(Transcription):
    """Liu et al. 2021, for each client: the fresh update's direction, and the stored one's length over all tensors."""

    interval = 1  # every round is stored

    def unlearn(self) -> None:
        stored = self.history[:: self.interval]
        for j, (w_t, replies) in enumerate(stored):
            self.enter("unlearn-0", j)
            U = {k: minus(replies[k], w_t) for k in self.staying}
            if j == 0:
                step = average([(U[k], SIZES[k]) for k in self.staying])
                self.w = {n: p + step[n] for n, p in self.w0.items()}
            else:
                self.ask()
                w = self.w
                E = EPOCHS * self.options.get("calibration", 0.5)
                fresh = {k: minus(self.learn(k, "retain", w, rate(j), epochs=E)[0], w) for k in self.staying}
                step = self.calibrated(fresh, U)
                self.w = {n: p + step[n] for n, p in w.items()}
            self.end_round()

    def calibrated(self, fresh: dict[ClientId, Weights], stored: dict[ClientId, Weights]) -> Weights:
        calibrated: Replies = []
        for k in self.staying:
            factor = length(stored[k]) / length(fresh[k])
            calibrated.append(({n: factor * p for n, p in fresh[k].items()}, SIZES[k]))
        return average(calibrated)

    def recover(self) -> None:
        pass


class FedEraserAuthors(FedEraser):
    """As the authors' code has it: every second round, and the mean update calibrated tensor by tensor."""

    interval = 2

    def calibrated(self, fresh: dict[ClientId, Weights], stored: dict[ClientId, Weights]) -> Weights:
        direction = average([(fresh[k], SIZES[k]) for k in self.staying])
        old = average([(stored[k], SIZES[k]) for k in self.staying])
        return {n: p / p.norm() * old[n].norm() for n, p in direction.items()}


class MoDe(Transcription):
    """Zhao et al. 2023 as FedQUIT's port has it: momentum degradation in the first rounds, memory guidance in all."""

    momentum = 0.95

    def unlearn(self) -> None:
        degraded = self.w0
        for r in range(self.options["unlearning_rounds"]):
            self.enter("unlearn-0", r)
            if r < self.options["degradation_rounds"]:
                self.ask()
                degraded = average([self.learn(k, "retain", degraded, LR) for k in self.staying])
                self.w = {n: self.momentum * p + (1 - self.momentum) * degraded[n] for n, p in self.w.items()}
            self.ask()
            replies = [self.learn(k, "retain", self.w, self.retained_lr) for k in self.staying]
            self.ask()
            replies += [self.guided(u, degraded) for u in self.leaving]
            self.w = average(replies)
            self.clock += 1
            self.end_round()

    @property
    def retained_lr(self) -> float:
        return float(self.options["retained_lr"])

    @property
    def target_lr(self) -> float:
        return LR

    def guided(self, u: ClientId, degraded: Weights) -> tuple[Weights, int]:
        """The leaving clients learn the classes that the degraded model gives to their examples."""
        visit = self.visit(u, "forget")

        def loss(w: Weights, step: Step) -> Tensor:
            with torch.no_grad():
                pseudo = net(degraded, step.x).argmax(-1)
            return cross_entropy(net(w, step.x), pseudo)

        return self.descend(visit, self.w, loss, sgd(self.target_lr, decay=WEIGHT_DECAY)), visit.examples


class MoDeSwapped(MoDe):
    """The two learning rates the other way round."""

    @property
    def retained_lr(self) -> float:
        return LR

    @property
    def target_lr(self) -> float:
        return float(self.options["target_lr"])


def without(v: Tensor, rows: Tensor) -> Tensor:
    """The part of v that is orthogonal to all rows, stretched to v's own length."""
    Q, _ = torch.linalg.qr(rows.T)
    d = v - Q @ (Q.T @ v)
    stretched: Tensor = d * (v.norm() / d.norm())
    return stretched


class FedOSD(Transcription):
    """Pan et al. 2025: the leaving clients' mean gradient, made orthogonal to that of every client who stays.

    Recovery takes no step back along w - w_0, and an unweighted mean.
    """

    def lr(self, r: int) -> float:
        """That of training after its last round."""
        return rate(ROUNDS)

    def recovery_lr(self, r: int) -> float:
        """That of training, which goes on."""
        return rate(ROUNDS + r)

    def unlearn(self) -> None:
        self.before = self.w
        for r in range(self.options["unlearning_rounds"]):
            self.enter("unlearn-0", r)
            lr, w = self.lr(r), self.w
            self.ask()
            g_u = torch.stack([self.gradient(self.unlikely(u, lr), lr) for u in self.leaving]).mean(0)
            self.ask()
            A = [self.gradient(self.learn(k, "retain", w, lr, decay=0.0)[0], lr) for k in self.staying]
            self.w = from_vector(vector(w) - lr * without(g_u, torch.stack(A)), w)
            self.end_round()

    def gradient(self, w_k: Weights, lr: float) -> Tensor:
        return vector(minus(self.w, w_k)) / lr

    def unlikely(self, u: ClientId, lr: float) -> Weights:
        """The unlearning cross-entropy: -log(1 - p_y / 2)."""

        def loss(w: Weights, step: Step) -> Tensor:
            p = net(w, step.x).softmax(-1)
            p_y = p[torch.arange(len(step.y)), step.y]
            return -(1 - p_y / 2).log().mean()

        return self.descend(self.visit(u, "forget"), self.w, loss, sgd(lr))

    def recover(self) -> None:
        for r in range(RECOVERY_ROUNDS):
            self.enter("recover-0", r)
            lr = self.recovery_lr(r)
            g_a = vector(minus(self.w, self.before)).unsqueeze(0)
            self.ask()
            g = [self.gradient(self.learn(k, "retain", self.w, lr, decay=0.0)[0], lr) for k in self.staying]
            d = torch.stack([without(g_k, g_a) for g_k in g]).mean(0)
            self.w = from_vector(vector(self.w) - lr * d, self.w)
            self.end_round()


class FedOSDAuthors(FedOSD):
    """With the authors' own rates."""

    def lr(self, r: int) -> float:
        return float(self.options["lr"] * self.options["lr_decay"] ** r)

    def recovery_lr(self, r: int) -> float:
        return float(self.options["recovery_lr"] * self.options["lr_decay"] ** r)


class PUF(Transcription):
    """Mora et al. 2025: a round of FedAvg in which the leaving clients' updates count negatively, eta times."""

    special = False  # a round of the leaving clients alone
    eta = 20.0

    def unlearn(self) -> None:
        self.enter("unlearn-0", 0)
        w, lr = self.w, rate(self.clock)
        eta = self.options.get("strength", self.eta)
        self.ask()
        updates: Replies = []
        for u in self.leaving:
            w_u, n_u = self.learn(u, "forget", w, lr)
            updates.append(({n: -eta * p for n, p in minus(w_u, w).items()}, n_u))
        if not self.special:
            self.ask()
            for k in self.staying:
                w_k, n_k = self.learn(k, "retain", w, lr)
                updates.append((minus(w_k, w), n_k))
        step = average(updates)
        self.w = {n: p + step[n] for n, p in w.items()}
        self.clock += 1
        self.end_round()


class PUFSpecial(PUF):
    special = True
    eta = 2.0


class FUSED(Transcription):
    """Zhong et al. 2025: those who stay train sparse adapters on the layers that moved most; the model is frozen."""

    def unlearn(self) -> None:
        self.base = self.w
        self.places = {n: self.drawn_places(self.base[n]) for n in self.critical()}
        self.adapters = {n: torch.zeros(len(at)).double() for n, at in self.places.items()}
        for r in range(self.options["overwriting_rounds"]):
            self.enter("unlearn-0", r)
            self.overwrite()

    def recover(self) -> None:
        for r in range(RECOVERY_ROUNDS):
            self.enter("recover-0", r)
            self.overwrite()
            self.clock += 1

    def critical(self) -> list[str]:
        """The weight tensors with the largest mean absolute change from what was sent to what came back."""
        moved = dict.fromkeys(self.w, 0.0)
        for w_t, replies in self.history:
            for w_k in replies.values():
                for n, change in minus(w_k, w_t).items():
                    moved[n] += float(change.abs().mean())
        weights = [n for n, p in self.w.items() if p.dim() >= 2]
        return sorted(weights, key=lambda n: moved[n], reverse=True)[:2]

    def drawn_places(self, tensor: Tensor) -> Tensor:
        """A fixed draw of a tenth of the weights."""
        order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(0))
        return order[: round(0.1 * tensor.numel())].sort().values

    def adapted(self, adapters: Weights) -> Weights:
        w = dict(self.base)
        for n, values in adapters.items():
            sparse = torch.zeros(w[n].numel()).double().index_put((self.places[n],), values)
            w[n] = w[n] + sparse.reshape(w[n].shape)
        return w

    def overwrite(self) -> None:
        """A round of FedAvg in which the adapters alone move, without weight decay."""
        self.ask()
        replies: Replies = []
        for k in self.staying:
            visit = self.visit(k, "retain", augmented=True)

            def loss(adapters: Weights, step: Step) -> Tensor:
                return learning(self.adapted(adapters), step)

            def named(adapters: Weights) -> Weights:
                return {f"adapter:{n}": p for n, p in adapters.items()}

            trained = self.descend(visit, self.adapters, loss, sgd(rate(self.clock)), sent=named)
            replies.append((trained, visit.examples))
        self.adapters = average(replies)
        self.w = self.adapted(self.adapters)
        self.end_round()
