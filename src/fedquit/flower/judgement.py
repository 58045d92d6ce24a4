# SPDX-License-Identifier: Apache-2.0
"""The one place where a client's reply is judged after it was read: whether it counts, and for how much.

`fedquit.flower.wire` has checked before that a reply has the tensors, types and sizes that its question implies. What
is judged here is what a well-formed reply may still do to the model of all. Each rule is one function:

| rule | consequence |
|---|---|
| `counted_examples`: as many examples as the operator agreed, less those erased | the reply counts for these |
| `require_examples`: a client that leaves has some, and as a whole no fewer than were agreed | the reply is refused |
| `permitted_step`: no further than optimizer, rate and steps allow | the reply is refused |
| `longest_step`: no further than 4 times what the cohort does | the update is scaled down |
| `is_idle`: a client that unlearns must move | the reply is refused |
| `is_too_far`: and not farther than training would | the reply is refused |
| `is_training`: and not in the direction of its own last update | the reply is refused |
| `kept_share`: of requests that are served together, none may cancel another | they are served one by one |

A client that leaves and is refused is asked again; then the fallback, which does not need it, serves its request.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquit.core import (
    ClientId,
    Local,
    Measurement,
    Memory,
    Params,
    Program,
    Reply,
    Split,
    Task,
)
from fedquit.core.params import dot, norm, sub
from fedquit.core.types import is_monitored
from fedquit.core.wrapper import FederationWrapper
from fedquit.engine import Ask
from fedquit.errors import FedquitError

SPREAD = 4.0  # times the cohort's median: the longest training step that counts as it is
COHORT = 4  # replies from which a median of their own is taken; with fewer, earlier rounds are asked as well
ADAM = 1.2  # times lr * steps: the farthest that Adam moves a parameter
GROWN = 2  # times the examples that it counts for: a site that has got more data takes more steps, and is no liar
ROUNDING = 1.001  # for bounds that hold exactly
IDLE = 0.05  # of what the steps should have done: a client that moves less has not unlearned
FAR = 10.0  # times what training does in as many steps: a client that moves farther has not unlearned either
ALIGNED = 0.1  # cosine with one's own last update: what is more has trained on
KEPT = 0.8  # of a client's own move that the merged model must hold
ROUNDS = 8  # of training whose medians are remembered
SKETCH = 2**14  # numbers that are remembered of a client's last update


class RefusedReply(FedquitError):
    """A well-formed reply that is not counted."""


# How much a reply counts.


def counted_examples(said: int, enrolled: int | None, erased: int = 0, *, leaving: bool = False) -> int:
    """How many examples a client counts for.

    Args:
        said: what the client says.
        enrolled: what the operator agreed with its site; None where the federation is not closed.
        erased: how many of these have been forgotten since.
        leaving: whether it is asked to unlearn, which may concern some of its examples.

    Returns:
        What was enrolled and is left, whatever the client says: n is its weight in the mean. A client that says that it
        has none trains nothing and counts for none; of a part, such as samples to forget, it says how many they are.
    """
    if enrolled is None:
        return said
    left = max(0, enrolled - erased)
    return min(said, left) if leaving or not said else left


def require_examples(ask: Ask, said: int, counted: int, fewest: int) -> None:
    """Refuse the reply of a client that leaves if it says that it has fewer examples than it must have.

    A reply without examples would count for nothing in a mean, and yet be the answer of methods that take no mean; with
    few of them, few steps would be expected.

    Args:
        ask: what the client was asked.
        said: the number of examples that it says it has.
        counted: the number that it counts for; 0 for one that takes no part any more.
        fewest: that it may say; 0 where nobody has agreed on a number, or only some samples are forgotten.
    """
    if not counted and any(part.split != "retain" for part in ask.parts):
        raise RefusedReply("it answers without an example that counts, and so it has not unlearned")
    if said < fewest:
        raise RefusedReply(
            f"it says that it has {said} examples, and it was enrolled with {fewest} that are not erased: it must "
            "unlearn them all, unless the operator agrees on another number"
        )


# How far a reply may be from what was sent.


@dataclass(frozen=True)
class Permitted:
    """How far some steps of an optimizer can lead; infinity where nothing bounds them."""

    largest: float = math.inf  # of a single parameter
    length: float = math.inf  # Euclidean, of all of them


def permitted_step(local: Local, steps: int, start: Params) -> Permitted:
    """How far a client can come by honest steps.

    Adam moves a parameter by about its rate, whatever the gradient is. SGD moves all of them by the rate times the
    gradient, which is bounded only where it is clipped; momentum adds up to 1 / (1 - momentum) of it. Weight decay adds
    a part of the parameters themselves, to AdamW's step and to SGD's.

    Args:
        local: optimizer, rate, momentum, decay, clipping.
        steps: how many.
        start: the parameters before the first one.
    """
    way = local.lr * steps
    if local.optimizer in ("adam", "adamw"):
        decay = way * local.weight_decay if local.optimizer == "adamw" else 0.0
        farthest = max((float(p.abs().max()) for p in start.values() if p.numel()), default=0.0)
        return Permitted(largest=_with_decay(ADAM * way, decay, farthest))
    if local.optimizer == "sgd" and local.momentum < 1:
        way /= 1 - local.momentum
        clip = min(local.clip or math.inf, (local.clip_tensor or math.inf) * math.sqrt(len(start)))
        return Permitted(length=ROUNDING * _with_decay(way * clip, way * local.weight_decay, float(norm(start))))
    return Permitted()


def _with_decay(way: float, decay: float, size: float) -> float:
    """The farthest d for which d <= way + decay * (size + d)."""
    return (way + decay * size) / (1 - decay) if decay < 1 else math.inf


def planned_steps(ask: Ask, reply: Reply, known: int = 0) -> int:
    """How many steps of training a reply has behind it, by its number of examples or by what it says of its parts.

    Args:
        ask: what the client was asked.
        reply: its reply.
        known: the examples that it must have used, whatever it says; a task that may end early takes what it says.
    """
    if known > reply.examples and not any(is_monitored(part.task) for part in ask.parts):
        return sum(p.task.local.steps(known) for p in ask.parts if not isinstance(p.task, Measurement))
    if reply.efforts:
        parts = zip(ask.parts, reply.efforts, strict=True)
        return sum(effort.steps for part, effort in parts if not isinstance(part.task, Measurement))
    return sum(p.task.local.steps(reply.examples) for p in ask.parts if not isinstance(p.task, Measurement))


def steps_from_start(task: Task) -> bool:
    """Whether an answer to the task is where its optimizer has come to from the model that was sent."""
    hooks = ("begin", "after_step", "answer", "monitor_end")
    return all(getattr(type(task), hook) is getattr(Task, hook) for hook in hooks)


def require_permitted(ask: Ask, update: Params, start: Params, reply: Reply, said: int) -> None:
    """Refuse a reply that no honest steps lead to.

    Args:
        ask: what the client was asked; one task that begins where it was sent, or nothing is known.
        update: by how much the reply differs from what was sent.
        start: what was sent.
        reply: the reply, with the number of examples that it counts for.
        said: the number of examples that the client says it has.
    """
    if len(ask.parts) != 1 or not steps_from_start(ask.parts[0].task):
        return
    local = ask.parts[0].task.local
    examples = min(said, GROWN * reply.examples)
    steps = local.steps(examples)
    permitted = permitted_step(local, steps, start)
    largest = max((float(p.abs().max()) for p in update.values() if p.numel()), default=0.0)
    length = float(norm(update)) if math.isfinite(permitted.length) else 0.0
    if largest > permitted.largest or length > permitted.length:
        raise RefusedReply(
            f"its parameters moved farther than {steps} steps of {local.optimizer} with rate {local.lr:g} can take them"
        )


def longest_step(lengths: Sequence[float], earlier: Sequence[float]) -> float:
    """The longest update that counts as it is, among the replies to one question.

    Args:
        lengths: of the updates.
        earlier: medians of earlier rounds; they are asked as well where fewer than `COHORT` clients replied, so that
            one of two or three cannot set the measure.

    Returns:
        `SPREAD` times the median; of an even number the lower one, so that half of the clients cannot raise it.
    """
    median = statistics.median_low(lengths)
    if len(lengths) < COHORT and earlier:
        own = median if len(lengths) > 1 else 0.0  # a single one would be its own measure
        median = max(own, statistics.median(earlier))
    return SPREAD * median


def shortened(reply: Reply, base: Params, factor: float) -> Reply:
    """The reply with its update times a factor."""
    params = {n: base[n] + factor * (p - base[n]) if n in base else p for n, p in reply.params.items()}
    return replace(reply, params=params)


# Whether a client that leaves has unlearned.


@dataclass(frozen=True)
class Pace:
    """What ordinary training does in a round, by the medians of the last rounds.

    Attributes:
        length: of a client's update.
        steps: of a client.
        rate: of learning.
        adaptive: whether the optimizer moves each parameter by about its rate, as Adam does.
    """

    length: float
    steps: float
    rate: float
    adaptive: bool


def expected_lengths(ask: Ask, steps: int, size: int, pace: Pace | None) -> tuple[float, float]:
    """How far a client's steps should take it: a careful and a generous estimate.

    Both begin with what training does in as many steps: a tiny forget set takes few. They allow for another rate, and
    for Adam where training is by SGD. Where training is by Adam and unlearning by SGD, nothing is known of the lower.

    Args:
        ask: what the client was asked.
        steps: that it takes.
        size: the number of parameters.
        pace: of training; None where it is not known, and nothing can be expected.
    """
    if pace is None or not pace.steps:
        return 0.0, math.inf
    locals_ = [part.task.local for part in ask.parts if not isinstance(part.task, Measurement)]
    lowest = min(local.lr for local in locals_)
    highest = max(local.lr for local in locals_)
    adaptive = any(is_adaptive(local) for local in locals_)
    share = steps / pace.steps
    if adaptive == pace.adaptive:
        least = pace.length * min(1.0, share) * min(1.0, lowest / pace.rate)
        return least, pace.length * max(1.0, share * max(1.0, highest / pace.rate))
    if adaptive:  # each parameter moves by up to the rate in every step, and by about the rate in the first
        most = max(pace.length * max(1.0, share), highest * steps * math.sqrt(size))
        return min(pace.length * min(1.0, share), lowest * math.sqrt(size)), most
    return 0.0, pace.length * max(1.0, share)


def is_adaptive(local: Local) -> bool:
    """Whether the optimizer moves each parameter by about its rate, whatever the gradient is."""
    return local.optimizer != "sgd"


@dataclass(frozen=True)
class Unlearning:
    """What is measured of the reply of a client that leaves.

    Attributes:
        length: of its update.
        least: how far the client's steps should have taken it, by a careful estimate.
        most: the same, by a generous one.
        cosine: with its own last update; None where that is not known, or the task does not oppose training.
    """

    length: float
    least: float
    most: float
    cosine: float | None


def is_idle(measured: Unlearning) -> bool:
    """Whether the model did not move: the client sent back what it was sent, or nearly so."""
    return measured.length <= IDLE * measured.least


def is_too_far(measured: Unlearning) -> bool:
    """Whether the model moved much farther than training would have moved it."""
    return measured.length > FAR * measured.most


def is_training(measured: Unlearning) -> bool:
    """Whether the client trained on instead: it moved as its last update did."""
    return measured.cosine is not None and measured.cosine > ALIGNED


def require_unlearned(measured: Unlearning) -> None:
    """Refuse the reply of a client that leaves and did not unlearn."""
    if is_idle(measured):
        raise RefusedReply("its model did not move: it has not unlearned")
    if is_too_far(measured):
        raise RefusedReply(
            f"its model moved by {measured.length:.3g}, where about {measured.most:.3g} was to be expected of its steps"
        )
    if is_training(measured):
        raise RefusedReply(
            f"it trained instead of unlearning: the cosine with its last update is {measured.cosine:.2f}"
        )


def kept_share(merged: Params, own: Params) -> float:
    """The part of a client's own move that the model of several clients that leave together holds.

    Args:
        merged: how the model moved.
        own: how the client's reply did.
    """
    length = float(dot(own, own))
    return float(dot(merged, own)) / length if length else 1.0


def is_unchanged(before: Params, after: Params) -> bool:
    """Whether an unlearning has left the model as it was, whatever the clients answered."""
    return all(torch.equal(tensor, after[name]) for name, tensor in before.items())


class DilutedError(FedquitError):
    """Requests that were served together cancel each other."""


@dataclass
class Witness(FederationWrapper):
    """A federation that remembers what the clients of a request answered in a round, to see whose answer lasts."""

    leaving: Collection[ClientId]
    replies: list[Reply] = field(default_factory=list)  # of clients that leave
    others: bool = False  # whether anybody else was asked: the model is then not theirs alone

    def run(
        self, task: Task | Program, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        """Ask these clients, and remember what those that leave answer."""
        self.others = self.others or any(client not in self.leaving for client in clients)
        for reply in self.inner.run(task, clients, split=split, **sent):
            if reply.client in self.leaving:
                self.replies.append(reply)
            yield reply

    def require_lasting(self, before: Params, after: Params) -> None:
        """Raise `DilutedError` where the model holds too little of what one of the clients did.

        Args:
            before: the model before the round.
            after: the model after it.
        """
        merged = sub(after, before)
        moves = [sub(r.params, before) for r in self.replies if r.params.keys() == before.keys()]
        if not self.others and any(kept_share(merged, move) < KEPT for move in moves):
            raise DilutedError("together they cancel a part of each other's unlearning")


def sketch(update: Params) -> Tensor:
    """An update in at most `SKETCH` numbers that keep angles: the cosine of two is right within about 0.01.

    Each number is a sum of parameters with signs, all drawn once and for all (a count sketch: Charikar, Chen,
    Farach-Colton: Finding Frequent Items in Data Streams. ICALP 2002). Small updates are kept as they are.
    """
    flat = torch.cat([update[name].detach().reshape(-1).to(torch.float32) for name in sorted(update)])
    if len(flat) <= SKETCH:
        return flat
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(SKETCH, (len(flat),), generator=generator)
    signs = 2.0 * torch.randint(2, (len(flat),), generator=generator) - 1.0
    return torch.zeros(SKETCH).index_add_(0, places, signs * flat)


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two vectors; 0 where one of them is zero."""
    lengths = float(a.norm() * b.norm())
    return float(a @ b) / lengths if lengths else 0.0


# The judge of one phase.

Event = dict[str, object]


class Judge:
    """Judges the replies of a phase, and remembers what later ones are measured by.

    Args:
        memory: the judge's part of the server's memory. What belongs to a client lies under its number, and is deleted
            with everything else of it.
        training: whether the phase is ordinary training, whose steps the others are measured by.
        log: takes what was measured.
    """

    def __init__(self, memory: Memory, *, training: bool, log: Callable[[Event], None] = lambda _: None) -> None:
        self._memory = memory
        self._training = training
        self._log = log

    def require_plausible(
        self,
        ask: Ask,
        base: Params,
        reply: Reply,
        *,
        leaving: bool,
        said: int | None = None,
        fewest: int = 0,
        known: int = 0,
    ) -> None:
        """Refuse what no client that did as it was asked can have sent.

        Args:
            ask: the question.
            base: the answer of a client that did nothing.
            reply: a well-formed reply.
            leaving: whether the client is to be forgotten by this answer.
            said: the number of examples that the client says it has; None where that is what it counts for.
            fewest: the number that a client which leaves may say, see `require_examples`.
            known: the number that it is known to have, which its steps are counted by; 0 where it is not known.

        Raises:
            RefusedReply: with the reason.
        """
        stated = reply.examples if said is None else said
        if leaving:
            require_examples(ask, stated, reply.examples, fewest)
        if not _trains(ask) or not (reply.examples or leaving):
            return
        update = _update(reply, base)
        start = {n: base[n] for n in update}
        require_permitted(ask, update, start, reply, stated)
        if leaving and (steps := planned_steps(ask, reply, known)):
            measured = self._measured(ask, update, reply, steps)
            self._log({"event": "unlearning", "client": reply.client, **_rounded(measured)})
            require_unlearned(measured)

    def bounded(self, ask: Ask, base: Params, replies: Sequence[Reply]) -> tuple[dict[ClientId, Reply], list[ClientId]]:
        """The replies of clients that stay, as they count; and those whose update was scaled down."""
        counted = {reply.client: reply for reply in replies}
        trained = [reply for reply in replies if reply.examples and planned_steps(ask, reply)]
        if not _trains(ask) or not trained:
            return counted, []
        updates = {reply.client: _update(reply, base) for reply in trained}
        lengths = {client: float(norm(update)) for client, update in updates.items()}
        longest = longest_step(list(lengths.values()), [row[0] for row in self._rounds])
        too_long = [client for client, length in lengths.items() if length > longest]
        for client in too_long:
            counted[client] = shortened(counted[client], base, longest / lengths[client])
        if self._training:
            self._remember(ask, trained, lengths, updates)
        spread = max(lengths.values()) * SPREAD / longest if longest else 0.0
        self._log({"event": "steps", "replies": len(lengths), "largest": round(spread, 4), "bounded": too_long})
        return counted, too_long

    def _remember(
        self, ask: Ask, trained: Sequence[Reply], lengths: Mapping[ClientId, float], updates: Mapping[ClientId, Params]
    ) -> None:
        steps = statistics.median_low([planned_steps(ask, reply) for reply in trained])
        local = ask.parts[-1].task.local
        newest = [statistics.median_low(list(lengths.values())), steps, local.lr, is_adaptive(local)]
        rounds = torch.tensor([newest], dtype=torch.float64)
        if known := self._memory.get("pace"):
            rounds = torch.cat([known["rounds"], rounds])[-ROUNDS:]
        self._memory["pace"] = {"rounds": rounds}
        for client, update in updates.items():
            if update.keys() == ask.sent.get("start", {}).keys():
                self._memory[f"update/{client}"] = {"sketch": sketch(update)}

    @property
    def _rounds(self) -> list[list[float]]:
        """The last rounds of training: as the fields of `Pace`."""
        known = self._memory.get("pace")
        return [] if known is None else [list(map(float, row)) for row in known["rounds"]]

    @property
    def pace(self) -> Pace | None:
        """What ordinary training does in a round; None before the first."""
        if not (rounds := self._rounds):
            return None
        length, steps, rate, adaptive = (statistics.median(column) for column in zip(*rounds, strict=True))
        return Pace(length, steps, rate, adaptive > 0.5)

    def _measured(self, ask: Ask, update: Params, reply: Reply, steps: int) -> Unlearning:
        kept = self._memory.get(f"update/{reply.client}")
        opposes = all(part.task.opposes_training for part in ask.parts)
        angle = None
        if kept is not None and opposes and update.keys() == ask.sent.get("start", {}).keys():
            angle = cosine(sketch(update), kept["sketch"])
        size = sum(p.numel() for p in update.values())
        least, most = expected_lengths(ask, steps, size, self.pace)
        return Unlearning(float(norm(update)), least, most, angle)


def _trains(ask: Ask) -> bool:
    """Whether an answer is a model, or a part of one; the means that a measurement answers with are not judged."""
    return not isinstance(ask.parts[-1].task, Measurement)


def _update(reply: Reply, base: Params) -> Params:
    """By how much a reply differs from the answer of a client that did nothing."""
    return {n: p.to(torch.float64) - base[n].to(torch.float64) for n, p in reply.params.items() if n in base}


def _rounded(measured: Unlearning) -> Event:
    event: Event = {"length": float(f"{measured.length:.6g}")}
    if measured.least:
        event["least"] = float(f"{measured.length / measured.least:.4g}")
    if math.isfinite(measured.most):
        event["most"] = float(f"{measured.length / measured.most:.4g}")
    if measured.cosine is not None:
        event["cosine"] = round(measured.cosine, 4)
    return event
