# SPDX-License-Identifier: Apache-2.0
"""Small methods, each of which breaks one contract of `fedquit check`, and one, `Good`, that breaks none."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedquit.core import (
    Batch,
    ClientId,
    Federation,
    Learn,
    Local,
    Memory,
    Model,
    Params,
    Reply,
    Request,
    Sent,
    State,
    Task,
    Trained,
    Training,
    cross_entropy,
    mean,
)
from fedquit.core.fedavg import fedavg
from fedquit.core.method import Method
from fedquit.core.params import add, sub
from fedquit.errors import RequestError
from fedquit.running.session import Session

CACHE: dict[str, Params] = {}
SAMPLES_REFUSED = "this method forgets whole clients and keeps nothing of single samples: use fedquit instead."


@dataclass(frozen=True)
class Climb(Task):
    """Go up the loss a little."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -cross_entropy(model(params, batch.x), batch.y)


LOCAL = Local(lr=0.01)


@dataclass(frozen=True)
class Good(Method):
    """Two rounds of gradient ascent at the leaving clients, away from the model before."""

    lr: float = 0.01

    def rounds(self, trained: Trained, request: Request) -> int:
        return 2

    def task(self, trained: Trained, state: State) -> Task:
        """What the leaving clients do."""
        return Climb(replace(LOCAL, lr=self.lr))

    def asked(self, fed: Federation, request: Request) -> list[ClientId]:
        """Who does it."""
        return list(request.clients)

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        before = state.kept.get("before", state.params)
        task = self.task(trained, state)
        replies = fed.run(task, self.asked(fed, request), split="forget", start=state.params)
        return state.next(mean(replies), before=before)


# ---- contract: what is read


@dataclass(frozen=True)
class AsksTheGone(Good):
    """Its recovery asks everybody, those who left too."""

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        everybody = sorted({*fed.clients, *request.clients})
        return fedavg(fed, state, trained.training, everybody, split="retain")


@dataclass(frozen=True)
class ForgetsLate(Good):
    """Reads forgotten samples in the recovery."""

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        if not request.samples:
            return super().recover(fed, state, trained, request)
        return state.next(mean(fed.run(Learn(), request.clients, split="forget", start=state.params))).tick()


@dataclass(frozen=True)
class ReadsAll(Good):
    """Asks the leaving clients for all of their data."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next(mean(fed.run(Climb(LOCAL), request.clients, split="all", start=state.params)))


@dataclass(frozen=True)
class AsksStayersToForget(Good):
    """Asks everybody for forget data."""

    def asked(self, fed: Federation, request: Request) -> list[ClientId]:
        return list(fed.clients)


@dataclass(frozen=True)
class AsksByPosition(Good):
    """Takes positions for the numbers of clients."""

    def asked(self, fed: Federation, request: Request) -> list[ClientId]:
        return [*request.clients, 0]


@dataclass(frozen=True)
class AsksTwice(Good):
    """Asks a client twice in one question."""

    def asked(self, fed: Federation, request: Request) -> list[ClientId]:
        return [*request.clients, *request.clients]


@dataclass(frozen=True)
class UsesPublicData(Good):
    """Uses public data without saying so."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next(fed.run_at_server(Climb(LOCAL), start=state.params))


# ---- contract: the server's memory


@dataclass(frozen=True)
class NamesKeysWrongly(Good):
    """The client's number is not the last part of the key."""

    def history_bytes(self, training: Training, clients: int, model_bytes: int) -> int:
        return 2 * clients * model_bytes

    def key(self, client: ClientId) -> str:
        """Where an update lies."""
        return f"client-{client}"

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        memory[self.key(reply.client)] = sub(reply.params, start)


@dataclass(frozen=True)
class KeepsUnderAnother(NamesKeysWrongly):
    """What is of one client lies under another's number."""

    def key(self, client: ClientId) -> str:
        return f"update/{11 if client == 12 else 12}"


@dataclass(frozen=True)
class KeepsOneSecretly(NamesKeysWrongly):
    """What is of one client alone lies under a key without a number."""

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        if reply.client == 12:
            memory["target"] = sub(reply.params, start)


@dataclass(frozen=True)
class KeepsACopy(NamesKeysWrongly):
    """Copies what belongs to a client before it is deleted."""

    def key(self, client: ClientId) -> str:
        return f"update/{client}"

    def forget(self, memory: Memory, clients: Iterable[ClientId]) -> None:
        for client in clients:
            if f"update/{client}" in memory:
                memory["archive"] = memory[f"update/{client}"]


@dataclass(frozen=True)
class KeepsNumbers(NamesKeysWrongly):
    """Keeps a number where only tensors can be kept."""

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        memory[f"loss/{reply.client}"] = reply.loss  # type: ignore[assignment]


@dataclass(frozen=True)
class KnowsTheFuture(Good):
    """Its training task depends on the request."""

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        slower = replace(task, local=replace(task.local, lr=task.local.lr / 2))
        return slower if client in request.clients else task


# ---- contract: tasks


@dataclass(frozen=True)
class ClimbFrom(Climb):
    """A task with tensors in a field."""

    centre: Any = None


@dataclass(frozen=True)
class SendsTensors(Good):
    """Puts tensors into a field of its task."""

    def task(self, trained: Trained, state: State) -> Task:
        return ClimbFrom(LOCAL, centre=tuple(trained.initial.values()))


@dataclass(frozen=True)
class ClimbWhole(Climb):
    """A task with a whole number."""

    steps: int = 1


@dataclass(frozen=True)
class SendsAnotherType(Good):
    """Gives a field a value of another type than it declares."""

    def task(self, trained: Trained, state: State) -> Task:
        return ClimbWhole(LOCAL, steps=0.5)  # type: ignore[arg-type]


@dataclass(frozen=True)
class HidesAttributes(Good):
    """Lets a task carry what is no field."""

    def task(self, trained: Trained, state: State) -> Task:
        task = Climb(LOCAL)
        object.__setattr__(task, "centre", trained.initial)
        return task


@dataclass(frozen=True)
class DefinesTasksInside(Good):
    """Defines its task's class inside a function."""

    def task(self, trained: Trained, state: State) -> Task:
        @dataclass(frozen=True)
        class Inner(Climb):
            pass

        return Inner(LOCAL)


@dataclass(frozen=True)
class MeanLoss(Task):
    """A loss of the batch, not of each example."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -cross_entropy(model(params, batch.x), batch.y).mean()


@dataclass(frozen=True)
class AveragesLosses(Good):
    """Its task's loss is one number."""

    def task(self, trained: Trained, state: State) -> Task:
        return MeanLoss(LOCAL)


# ---- contract: in place


@dataclass(frozen=True)
class ChangesTheState(Good):
    """Changes the model before the round."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        w = {n: p.clone() for n, p in state.params.items()}
        for p in state.params.values():
            p.mul_(0.5)
        return state.next(mean(fed.run(Climb(LOCAL), request.clients, split="forget", start=w)))


@dataclass(frozen=True)
class ChangesReplies(Good):
    """Adds up replies in the first of them."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        first, *_ = fed.run(Climb(LOCAL), request.clients, split="forget", start=state.params)
        for p in first.params.values():
            p.mul_(0.5)
        return state.next({n: p * 2 for n, p in first.params.items()})


@dataclass(frozen=True)
class ChangesMemory(NamesKeysWrongly):
    """Adds up what it keeps in place."""

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        key = f"sum/{reply.client}"
        if key not in memory:
            memory[key] = sub(reply.params, start)
        else:
            for n, p in memory[key].items():
                p.add_(reply.params[n] - start[n])


@dataclass(frozen=True)
class Halting(Climb):
    """A task that changes what it was given."""

    def after_step(self, new: Params, old: Params, sent: Sent) -> Params:
        for p in old.values():
            p.add_(1e-3)
        return new


@dataclass(frozen=True)
class ChangesInATask(Good):
    """A hook of its task works in place."""

    def task(self, trained: Trained, state: State) -> Task:
        return Halting(LOCAL)


# ---- contract: state of its own


@dataclass(frozen=True)
class RemembersOnSelf(Good):
    """Keeps the model before the first round on itself."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        if state.round == 0:
            object.__setattr__(self, "before", state.params)
        return super().unlearn(fed, state, trained, request)


@dataclass(frozen=True)
class RemembersOnClass(Good):
    """Keeps it on its class."""

    seen: ClassVar[list[int]] = []

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        self.seen.append(state.round)
        return super().unlearn(fed, state, trained, request)


@dataclass(frozen=True)
class RemembersInModule(Good):
    """Keeps it in its module."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        CACHE[f"before {state.round}"] = state.params
        return super().unlearn(fed, state, trained, request)


class Undecorated(Good):
    """No dataclass of its own: `strength` is no option."""

    strength: float = 1.0


@dataclass(frozen=True)
class HoldsTensors(Good):
    """A field that no recipe can express."""

    centre: Any = field(default_factory=lambda: torch.zeros(2))


# ---- contract: what is returned


@dataclass(frozen=True)
class Returns(Good):
    """Returns a model that something is wrong with."""

    def spoilt(self, w: Params) -> Any:
        """The model, with something wrong."""
        return w

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        w = mean(fed.run(self.task(trained, state), request.clients, split="forget", start=state.params))
        return state.next(self.spoilt(w))


@dataclass(frozen=True)
class LosesALayer(Returns):
    def spoilt(self, w: Params) -> Any:
        return dict(list(w.items())[1:])


@dataclass(frozen=True)
class Sorts(Returns):
    def spoilt(self, w: Params) -> Any:
        return dict(sorted(w.items()))


@dataclass(frozen=True)
class Flattens(Returns):
    def spoilt(self, w: Params) -> Any:
        return {n: p.reshape(-1) for n, p in w.items()}


@dataclass(frozen=True)
class Rounds(Returns):
    def spoilt(self, w: Params) -> Any:
        return {n: p.float() for n, p in w.items()}


@dataclass(frozen=True)
class Explodes(Returns):
    def spoilt(self, w: Params) -> Any:
        return {n: p / 0 for n, p in w.items()}


@dataclass(frozen=True)
class KeepsTheGraph(Returns):
    def spoilt(self, w: Params) -> Any:
        return {n: p.requires_grad_() * 1 for n, p in w.items()}


@dataclass(frozen=True)
class StandsStill(Good):
    """Returns the state of the same round."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state


@dataclass(frozen=True)
class ReturnsParams(Good):
    """Returns parameters in the place of a state."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.params  # type: ignore[return-value]


@dataclass(frozen=True)
class Diverging(Climb):
    """Climbs beyond all numbers."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -1e308 * 1e10 * cross_entropy(model(params, batch.x), batch.y)


@dataclass(frozen=True)
class Diverges(Good):
    """A client's reply is not finite."""

    def task(self, trained: Trained, state: State) -> Task:
        return Diverging(LOCAL)


# ---- determinism


@dataclass(frozen=True)
class Noisy(Returns):
    """Adds noise from some generator."""

    def draw(self) -> float:
        """A number at random."""
        return 0.0

    def spoilt(self, w: Params) -> Any:
        noise = self.draw()
        return {n: p + 1e-3 * noise for n, p in w.items()}


@dataclass(frozen=True)
class DrawsFromTorch(Noisy):
    def draw(self) -> float:
        return float(torch.rand(()))


@dataclass(frozen=True)
class DrawsFromNumpy(Noisy):
    def draw(self) -> float:
        return float(np.random.rand())  # noqa: NPY002 - what is not allowed


@dataclass(frozen=True)
class DrawsFromPython(Noisy):
    def draw(self) -> float:
        return random.random()


@dataclass(frozen=True)
class DrawsFromTheSystem(Noisy):
    def draw(self) -> float:
        return float(np.random.default_rng().random())


@dataclass(frozen=True)
class DrawsAndRestores(Noisy):
    """Leaves the global generator as it was, and depends on it all the same."""

    def draw(self) -> float:
        with torch.random.fork_rng(devices=[]):
            return float(torch.rand(()))


@functools.cache
def tickets() -> list[int]:
    """Something that a process uses up and nobody sees."""
    return [1, 2, 3, 4, 5, 6, 7, 8]  # two rounds for each kind of request


@dataclass(frozen=True)
class WorksOnce(Good):
    """Uses something up that lasts for the first lives of a process."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        tickets().pop()
        return super().unlearn(fed, state, trained, request)


@dataclass(frozen=True)
class DropOut(Climb):
    """A task that draws by itself."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return super().loss(model, params, sent, batch) * (torch.rand(len(batch.y)) < 0.5)


@dataclass(frozen=True)
class DrawsInATask(Good):
    def task(self, trained: Trained, state: State) -> Task:
        return DropOut(LOCAL)


# ---- resume


@dataclass(frozen=True)
class KeepsAnEmptyMark(Good):
    """Takes an empty set of tensors for a mark: nothing of it is on disk."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        lr = 0.01 if "begun" in state.kept else 0.02
        replies = fed.run(Climb(Local(lr=lr)), request.clients, split="forget", start=state.params)
        return state.next(mean(replies), begun={})


@functools.cache
def notebook() -> dict[int, Params]:
    """Something that a process remembers and nobody sees."""
    return {}


@dataclass(frozen=True)
class RemembersInTheProcess(Good):
    """Goes back to the model before the last round, which only the process remembers."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        notebook()[state.round] = state.params
        w = notebook().get(state.round - 1, state.params)
        return state.next(mean(fed.run(Climb(LOCAL), request.clients, split="forget", start=w)))


# ---- engines


@dataclass(frozen=True)
class Centred(Climb):
    """A loss that compares an example with the others of its batch."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        logits = model(params, batch.x)
        return -cross_entropy(logits - logits.mean(0), batch.y)


@dataclass(frozen=True)
class ComparesExamples(Good):
    def task(self, trained: Trained, state: State) -> Task:
        return Centred(LOCAL)


@dataclass(frozen=True)
class Branching(Climb):
    """A task that branches on a tensor."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        losses = cross_entropy(model(params, batch.x), batch.y)
        return -losses if bool(losses.mean() < 5) else losses


@dataclass(frozen=True)
class Branches(Good):
    def task(self, trained: Trained, state: State) -> Task:
        return Branching(LOCAL)


# ---- Flower


@dataclass(frozen=True)
class Sparse(Climb):
    """Sends what has grown, whose size depends on the data."""

    def answer(self, params: Params, sent: Sent) -> Params:
        grown = {n: (p - sent["start"][n]).flatten() for n, p in params.items()}
        sent_at = {f"at:{n}": (p > 0).double() for n, p in grown.items()}
        return {**sent_at, **{f"by:{n}": p[p > 0] for n, p in grown.items()}}


@dataclass(frozen=True)
class SendsWhatGrew(Good):
    """Replies of a size that the server cannot know."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        w = state.params
        for reply in fed.run(Sparse(LOCAL), request.clients, split="forget", start=w):
            grown = {n: torch.zeros_like(p).flatten() for n, p in w.items()}
            for n, p in grown.items():
                p[reply.params[f"at:{n}"].bool()] = reply.params[f"by:{n}"]
            w = add(w, {n: p.view_as(w[n]) for n, p in grown.items()})
        return state.next(w)


# ---- requests


@dataclass(frozen=True)
class FailsForSamples(Good):
    """Does not think of samples."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        if request.samples:
            raise KeyError("samples")
        return super().unlearn(fed, state, trained, request)


@dataclass(frozen=True)
class RefusesWithAnotherError(Good):
    """Refuses, but not with a RequestError."""

    def check(self, request: Request) -> None:
        if request.samples:
            raise NotImplementedError(SAMPLES_REFUSED)


@dataclass(frozen=True)
class RefusesWithoutAReason(Good):
    """Refuses with a word."""

    def check(self, request: Request) -> None:
        if request.samples:
            raise RequestError("no samples")


@dataclass(frozen=True)
class RefusesEverything(Good):
    """Serves nothing."""

    def check(self, request: Request) -> None:
        raise RequestError(SAMPLES_REFUSED)


@dataclass(frozen=True)
class RefusesSamples(Good):
    """Refuses as it should; breaks no contract."""

    def check(self, request: Request) -> None:
        if request.samples:
            raise RequestError(SAMPLES_REFUSED)


# ---- costs


@dataclass(frozen=True)
class ReadsOneReply(Good):
    """Asks all who stay, and takes the first reply."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        replies = fed.run(Climb(LOCAL), request.stay(fed.clients), split="retain", start=state.params)
        return state.next(next(iter(replies)).params)


@dataclass(frozen=True)
class RunsTheNetwork(Good):
    """Runs the network at the server."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        logits = fed.model(state.params, torch.ones(4, 1, 4, 4, dtype=torch.float64))
        assert logits.shape[0] == 4
        return super().unlearn(fed, state, trained, request)


@dataclass(frozen=True)
class ReachesInside(Good):
    """Asks the federation behind the meter."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        inner: Federation = fed.inner  # type: ignore[attr-defined]
        return super().unlearn(inner, state, trained, request)


@dataclass(frozen=True)
class GoesAround(Good):
    """Finds the session on the stack, and asks it."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        sessions = [v for frame in inspect.stack(0) for v in frame.frame.f_locals.values() if isinstance(v, Session)]
        return super().unlearn(sessions[0], state, trained, request)


@dataclass(frozen=True)
class KeepsAtHome(Good):
    """Its clients keep their last model, and `at_home` does not say so."""

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        return replace(task, remember="last")


@dataclass(frozen=True)
class PromisesTooLittle(Good):
    """Keeps every update, and does not say how much that is."""

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        memory[f"{round}/{reply.client}"] = sub(reply.params, start)


@dataclass(frozen=True)
class Thinking(Climb):
    """Runs the network before the first step."""

    def prepare(self, model: Model, sent: Sent) -> Sent:
        for _ in range(50):
            model(sent["start"], torch.ones(32, 1, 4, 4, dtype=torch.float64))
        return sent


@dataclass(frozen=True)
class ComputesElsewhere(Good):
    """Work that is not in the loss."""

    def task(self, trained: Trained, state: State) -> Task:
        return Thinking(LOCAL)


# ---- behaviour


@dataclass(frozen=True)
class Ruins(Method):
    """Forgets everything, and nothing follows."""

    recovers = False

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next({n: torch.zeros_like(p) for n, p in state.params.items()})
