# SPDX-License-Identifier: Apache-2.0
"""The client's side: a few lines make a Flower `ClientApp` erasable.

    app = erasable(ClientApp(), model=lambda context: Net(), data=load_my_data)

Flower starts a new process for each message and forgets a client's state with its node; so what a client keeps, and
what its owner has asked for, lies in files in the client's *home*.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedquit.core import Model
from fedquit.core.params import placed
from fedquit.data.preprocessing import AS_STORED, Look
from fedquit.engine import Address, Examples, run_client
from fedquit.engine.plan import fixed_uniforms
from fedquit.engine.sequential import at_home, reply_of
from fedquit.errors import FedquitError, InputError, RequestError
from fedquit.flower import wire
from fedquit.flower.outbox import Entry, Outbox, require_id
from fedquit.models import FunctionalModel
from fedquit.running.store import DiskMemory, locked

ACTION = "fedquit"  # messages of the types train.fedquit and query.fedquit are ours


@dataclass(frozen=True)
class ClientData:
    """What a client trains on. A request for samples names them by their place in `x`, counted from 0."""

    x: Tensor
    y: Tensor
    look: Look = AS_STORED
    positions: Tensor | None = None  # the examples' own numbers, where they have any: what a task draws for them once

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise InputError(f"there are {len(self.x)} examples and {len(self.y)} labels: give one label for each.")

    @property
    def numbers(self) -> Tensor:
        """The examples' own numbers."""
        return torch.arange(len(self.y)) if self.positions is None else self.positions


ModelOf = Callable[[Context], nn.Module | Model]
DataOf = Callable[[Context], ClientData | tuple[Tensor, Tensor]]
HomeOf = Callable[[Context], Path]


def home_from(context: Context) -> Path:
    """`fedquit-home` of the node's own configuration; in a simulation, a folder for each partition below the run's."""
    own = context.node_config.get("fedquit-home")
    if own:
        return Path(str(own))
    shared, partition = context.run_config.get("fedquit.home"), context.node_config.get("partition-id")
    if shared and partition is not None:
        return Path(str(shared)) / f"partition-{partition}"
    raise InputError(
        "this client has no home: start its SuperNode with --node-config 'fedquit-home=\"/a/folder/of/its/own\"', or "
        "set fedquit.home in the run's configuration for a simulation."
    )


def erasable(app: ClientApp, *, model: ModelOf, data: DataOf, home: Path | HomeOf = home_from) -> ClientApp:
    """Let a `ClientApp` answer fedquit's questions, beside whatever it does already.

    Args:
        app: the app; its own functions stay as they are.
        model: the network, given the context: a `torch.nn.Module`, or a `fedquit.core.Model`.
        data: what this client trains on, given the context: (x, y), or a `ClientData`.
        home: the folder for what the client keeps and for its owner's requests; a function of the context where
            several clients share a machine and its configuration.
    """
    where = home if callable(home) else (lambda _context: home)

    def client(context: Context) -> _Client:
        return _Client(partial(model, context), partial(data, context), where(context), context)

    @app.train(ACTION)  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        return _answered(message, lambda: client(context).answer(message))

    @app.query(ACTION)  # type: ignore[untyped-decorator, unused-ignore]
    def status(message: Message, context: Context) -> Message:
        return _answered(message, lambda: client(context).status(message))

    return app


def _answered(message: Message, work: Callable[[], Any]) -> Message:
    """A fault that somebody can mend goes back as its sentence; all others are Flower's to report."""
    try:
        content = work()
    except FedquitError as error:
        content = wire.refusal_to_records(str(error))
    wire.stamp_like(content, message.content)
    return Message(content, reply_to=message)


def functional(make: Callable[[], nn.Module | Model]) -> Model:
    """A `Model` from whatever the user's function returns."""
    made = make()
    if not isinstance(made, nn.Module):
        return made
    dtype = next((p.dtype for p in made.parameters()), torch.float32)
    return FunctionalModel(cast("Callable[[], nn.Module]", make), dtype)


def as_data(given: ClientData | tuple[Tensor, Tensor]) -> ClientData:
    """(x, y), or more."""
    return given if isinstance(given, ClientData) else ClientData(*given)


@dataclass(frozen=True)
class _Client:
    """A client in its home, for one message."""

    make_model: Callable[[], nn.Module | Model]
    make_data: Callable[[], ClientData | tuple[Tensor, Tensor]]
    home: Path
    context: Context

    def answer(self, message: Message) -> Any:  # noqa: ANN401 - Flower's records have no types here
        """Do the task of a question."""
        question = wire.question_from_records(message.content)
        with locked(self.home, wait=True):
            outbox = Outbox(self.home)
            settled = _settle(outbox, question.verdicts, self.home / "memory")
            mine = self._examples(outbox, question)
            reply = self._work(question, mine)
            return wire.answer_to_records(wire.Answer(reply, self._pending(outbox), settled), question)

    def _work(self, question: wire.Question, mine: Examples) -> Any:  # noqa: ANN401
        ask, client, device = question.ask, question.client, mine.y.device
        memory = DiskMemory(self.home / "memory" / require_id(question.federation, "federation"), device=device)
        memory.move(question.round_place)
        memory.settle()  # a round may be asked again from its beginning, never an earlier one
        memory.move(question.place)
        sent = {name: placed(params, device) for name, params in ask.sent.items()}
        sent |= at_home(memory, ask.task, client)
        done = run_client(functional(self.make_model), ask.task, mine, sent, ask.address.seed_for(client))
        return reply_of(memory, client, len(mine.y), done)

    def status(self, message: Message) -> Any:  # noqa: ANN401
        """How many examples there are, and which requests wait."""
        words = wire.words_from_records(message.content)
        with locked(self.home, wait=True):
            outbox = Outbox(self.home)
            verdicts = {str(k): str(v) for k, v in dict(words.get("verdicts", {})).items()}
            settled = _settle(outbox, verdicts, self.home / "memory")
            pending = self._pending(outbox)
            partition = self.context.node_config.get("partition-id")
            return wire.words_to_records(
                {
                    "examples": int(self._present(outbox).sum()),
                    "partition": None if partition is None else str(partition),
                    **wire.beside_to_words(pending, settled),
                }
            )

    @cached_property
    def _data(self) -> ClientData:
        return as_data(self.make_data())

    def _present(self, outbox: Outbox) -> Tensor:
        """Which examples have not been forgotten."""
        present = torch.ones(len(self._data.y), dtype=torch.bool)
        for entry in outbox.entries():
            if entry.status == "served" and entry.kind == "samples":
                present[self._places(outbox, entry)] = False
        return present

    def _places(self, outbox: Outbox, entry: Entry) -> list[int]:
        """Where the samples of a request lie; a place that is gone says that the data is not what it was."""
        count = len(self._data.y)
        if max(entry.positions, default=-1) >= count:
            raise InputError(
                f"{outbox.folder / entry.id}.json names sample {max(entry.positions)}, and this client has only "
                f"{count} samples now: give it its data as it was, in the same order; what was forgotten is left out "
                "by itself."
            )
        return list(entry.positions)

    def _examples(self, outbox: Outbox, question: wire.Question) -> Examples:
        data, ask = self._data, question.ask
        if any(e.kind == "client" and e.status == "served" for e in outbox.entries()):
            raise RequestError("this client has been forgotten at its owner's request, and works no more.")
        present = self._present(outbox)
        marked = self._marked(outbox, question.serving) & present
        chosen = {"all": present, "forget": marked, "retain": present & ~marked}[ask.split]
        at = chosen.nonzero().squeeze(1)
        own = Address(ask.address.seed, "fixed").seed_for(question.client)
        fixed = fixed_uniforms(data.numbers[at.cpu()], own, data.y.shape[1:])
        device = data.y.device
        return Examples(
            data.x[at.to(device)], data.y[at.to(device)], fixed.to(device), marked[at].to(device), data.look
        )

    def _marked(self, outbox: Outbox, serving: wire.Serving) -> Tensor:
        marked = torch.full((len(self._data.y),), serving.kind == "client")
        if serving.kind == "samples":
            marked[self._places(outbox, self._chosen(outbox, outbox.get(serving.request)))] = True
        return marked

    def _chosen(self, outbox: Outbox, entry: Entry) -> Entry:
        """The samples of a request: those it names, or as many as its fraction says, drawn once and written down."""
        if not entry.positions:
            left = self._present(outbox).nonzero().squeeze(1)
            count = max(1, round(entry.fraction * len(left)))
            seed = int.from_bytes(hashlib.blake2b(entry.id.encode(), digest_size=7).digest(), "big")
            drawn = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed))[:count]
            entry = outbox.choose(entry.id, left[drawn].tolist())
        return entry

    def _pending(self, outbox: Outbox) -> tuple[wire.Pending, ...]:
        """What the server should know, as much as a reply may carry; what cannot be served is refused here and now."""
        found = []
        for entry in outbox.pending():
            if entry.kind == "samples":
                reason = _unusable(self._chosen(outbox, entry).positions, self._present(outbox))
                if reason:
                    outbox.settle(entry.id, reason)
                    continue
            found.append(wire.Pending(entry.id, entry.kind))
        found.sort(key=lambda p: p.kind)  # the whole client first: it makes the others needless
        return tuple(found[: wire.MOST_PENDING])


def _unusable(positions: tuple[int, ...], present: Tensor) -> str:
    """Why these samples cannot be forgotten; "" if they can."""
    if not positions or positions[-1] >= len(present):
        return f"it names sample {positions[-1] if positions else '-'}, and this client has {len(present)}."
    left = present[list(positions)]
    if not bool(left.any()):
        return "all samples that it names have been forgotten already."
    if int(left.sum()) >= int(present.sum()):
        return "it names every sample that is left: ask for the whole client to be forgotten."
    return ""


def _settle(outbox: Outbox, verdicts: Mapping[str, str], memory: Path) -> tuple[str, ...]:
    """Write down what became of requests. What was remembered before a request was served is deleted with it."""
    statuses = {e.id: e.status for e in outbox.entries()}
    for request, verdict in verdicts.items():
        if request not in statuses:
            continue
        if verdict == "served" and statuses[request] != "served" and memory.exists():
            shutil.rmtree(memory)
        outbox.settle(request, verdict)
    return tuple(verdicts)
