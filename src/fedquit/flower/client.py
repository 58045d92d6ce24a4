# SPDX-License-Identifier: Apache-2.0
"""The client's side: `erasable` lets a Flower `ClientApp` answer fedquit's messages.

    app = erasable(ClientApp(), model=lambda context: Net(), data=load_my_data)

Flower starts a new process for each message and loses a client's state when its node ends. So the client's memory and
its owner's requests are files in the client's *home* directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedquit.audit.canaries import NATURAL, fields_of
from fedquit.audit.scores import score_examples
from fedquit.core import Model, Reply, Split
from fedquit.core.local_layers import LAYERS, is_layers_key
from fedquit.core.params import placed
from fedquit.engine import Examples, client_memory, make_reply, run_visit
from fedquit.errors import FedquitError, InputError
from fedquit.flower import wire
from fedquit.flower.canaries import HomeCanaries
from fedquit.flower.client_data import ClientData, ClientSplits
from fedquit.flower.outbox import Outbox, Receipt, note_contact, require_id
from fedquit.flower.own_training import (
    ErasableApp,
    Mod,
    ModuleOf,
    OwnDataOf,
    OwnTraining,
    T_co,
    Unlearning,
    subset_remaining,
)
from fedquit.inference.one_run import default_guesses
from fedquit.models import FunctionalModel
from fedquit.running.store import DiskMemory, locked

__all__ = [
    "ClientData",
    "DataOf",
    "HomeOf",
    "ModelOf",
    "as_data",
    "erasable",
    "erasing_mod",
    "functional",
    "home_from",
    "remaining",
]

ModelOf = Callable[[Context], nn.Module | Model]
DataOf = Callable[[Context], ClientData | tuple[Tensor, Tensor]]
HomeOf = Callable[[Context], Path]


def home_from(context: Context) -> Path:
    """The client's home: the node's `fedquit-home`, or in a simulation one directory a partition below the run's."""
    own = context.node_config.get("fedquit-home")
    if own:
        return Path(str(own))
    shared = context.run_config.get("fedquit.home")
    partition = context.node_config.get("partition-id")
    if shared and partition is not None:
        return Path(str(shared)) / f"partition-{partition}"
    raise InputError(
        "this client has no home: start its SuperNode with --node-config 'fedquit-home=\"/a/folder/of/its/own\"', or "
        "set fedquit.home in the run's configuration for a simulation."
    )


def erasable(
    app: ClientApp,
    *,
    model: ModelOf,
    data: DataOf | OwnDataOf,
    home: Path | HomeOf = home_from,
    canaries: int = 0,
    unlearning: Unlearning | None = None,
) -> ClientApp:
    """Let a `ClientApp` answer fedquit's messages, in addition to its own.

    Without `unlearning`, fedquit's server (`serve`) trains and unlearns. With it the app keeps its own training, and
    `Forgetting` around the app's own strategy asks it to unlearn.

    Args:
        app: the app; its own functions stay as they are.
        model: the network, given the context: a `torch.nn.Module`, or a `fedquit.core.Model`.
        data: what this client trains on, given the context: (x, y) with one label for each example, or a `ClientData`;
            with `unlearning` whatever `fedquit.unlearn` takes.
        home: the directory for the client's memory and its owner's requests; a function of the context where several
            clients share a machine and its configuration.
        canaries: how many of the examples serve the one-run audit: a secret coin for each, tossed at home, decides
            whether it is trained on. Set it before the client's first round; 0 for no audit.
        unlearning: how the client unlearns, where the app keeps its own training.

    Returns:
        The app to offer to Flower in place of the given one.

    Raises:
        InputError: for an app with a `client_fn`, which takes `erasing_mod` instead; or for canaries in an app that
            keeps its own training.
    """
    home_of = home if callable(home) else (lambda _context: home)
    if unlearning is not None:
        if canaries:
            raise InputError("canaries are left out by fedquit's own training: leave canaries or unlearning out.")
        return ErasableApp(app, OwnTraining(cast("ModuleOf", model), cast("OwnDataOf", data), home_of, unlearning))
    model_of = model
    data_of = cast("DataOf", data)

    def client(context: Context) -> _Client:
        return _Client(partial(model_of, context), partial(data_of, context), home_of(context), context, canaries)

    @app.train(wire.ACTION)  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        return _reply_to(message, lambda: client(context).answer(message))

    @app.query(wire.ACTION)  # type: ignore[untyped-decorator, unused-ignore]
    def status(message: Message, context: Context) -> Message:
        return _reply_to(message, lambda: client(context).status(message))

    return app


def erasing_mod(*, model: ModuleOf, data: OwnDataOf, unlearning: Unlearning, home: Path | HomeOf = home_from) -> Mod:
    """The mod that makes an app with a `client_fn` erasable: `ClientApp(client_fn, mods=[erasing_mod(…), …])`.

    Put it first: mods before it would refuse its query, which has no arrays. Mods after it do not see the unlearning.

    Args:
        model: the network, given the context.
        data: what this client trains on, given the context: whatever `fedquit.unlearn` takes.
        unlearning: how the client unlearns.
        home: the directory for its owner's requests, or a function of the context.
    """
    home_of = home if callable(home) else (lambda _context: home)
    return OwnTraining(model, data, home_of, unlearning)


def remaining(dataset: Dataset[T_co], context: Context, home: Path | HomeOf = home_from) -> Dataset[T_co]:
    """A client's data without the samples that its owner asked to be forgotten, for the app's own training.

    Args:
        dataset: the whole data, map-style, always in the same order.
        context: of the client.
        home: where its owner's requests are, or a function of the context.

    Raises:
        RequestError: if the whole client has been forgotten.
    """
    return subset_remaining(dataset, Outbox(home(context) if callable(home) else home))


def _reply_to(message: Message, work: Callable[[], RecordDict]) -> Message:
    """A reply with the result; an error that somebody can correct goes back as its sentence, others to Flower."""
    try:
        content = work()
    except FedquitError as error:
        content = wire.refusal_to_records(str(error))
    wire.return_nonce(content, message.content)
    return Message(content, reply_to=message)


def functional(make: Callable[[], nn.Module | Model]) -> Model:
    """A `Model` from whatever the user's function returns."""
    made = make()
    if not isinstance(made, nn.Module):
        return made
    dtype = next((p.dtype for p in made.parameters()), torch.float32)
    return FunctionalModel(cast("Callable[[], nn.Module]", make), dtype)


def as_data(given: ClientData | tuple[Tensor, Tensor]) -> ClientData:
    """`ClientData` from whatever the user's function returns."""
    return given if isinstance(given, ClientData) else ClientData(*given)


@dataclass(frozen=True)
class _Client:
    """A client in its home, for one message."""

    make_model: Callable[[], nn.Module | Model]
    make_data: Callable[[], ClientData | tuple[Tensor, Tensor]]
    home: Path
    context: Context
    canaries: int = 0  # to draw where none are drawn yet

    @property
    def home_canaries(self) -> HomeCanaries:
        """The canaries in this client's home."""
        return HomeCanaries(self.home, self.canaries)

    def splits(self, outbox: Outbox) -> ClientSplits:
        """The client's data, without what must not be trained on."""
        data = as_data(self.make_data())
        forgotten = any(e.kind == "client" and e.status == "served" for e in outbox.entries())
        canaries = None if forgotten else self.home_canaries.drawn(len(data.y))
        return ClientSplits(data, outbox, canaries)

    def answer(self, message: Message) -> RecordDict:
        """Carry out the task of a question."""
        question = wire.question_from_records(message.content)
        with locked(self.home, wait=True):
            outbox = Outbox(self.home)
            self._hear(outbox, question.received, question.federation)
            settled = _settle(outbox, question.verdicts, self.home / "memory", self.home_canaries)
            splits = self.splits(outbox)
            examples = {split: splits.examples(question, split) for split in question.ask.splits}
            reply = self._work(question, examples)
            return wire.answer_to_records(wire.Answer(reply, splits.pending(), settled), question)

    def _hear(self, outbox: Outbox, received: Mapping[str, Receipt], federation: str) -> None:
        """Write down that the server speaks to this client, and which requests it has received."""
        note_contact(self.home, federation)
        known = {entry.id for entry in outbox.entries()}
        for request, receipt in received.items():
            if request in known:
                outbox.note_receipt(request, receipt)

    def _work(self, question: wire.Question, examples: Mapping[Split, Examples]) -> Reply:
        client = question.client
        device = examples[question.ask.splits[0]].y.device
        memory = DiskMemory(self.home / "memory" / require_id(question.federation, "federation"), device=device)
        memory.move(question.round_place)
        memory.settle()  # a round may be asked again from its beginning, never an earlier one
        memory.move(question.place)
        sent = {name: placed(params, device) for name, params in question.ask.sent.items()}
        ask = replace(question.ask, sent=sent)
        own = dict(client_memory(memory, ask.task, client))
        if memory.written_at(f"{client}/{LAYERS}") < question.oldest_layers:
            own.pop(LAYERS, None)  # it was away when the model began anew
        used, result = run_visit(functional(self.make_model), ask, client, examples, own)
        return make_reply(memory, client, used, result)

    def status(self, message: Message) -> RecordDict:
        """How many examples there are, and which requests are pending."""
        body = wire.body_from_records(message.content)
        given = dict(body.get("verdicts", {}))
        verdicts = {str(request): str(verdict) for request, verdict in given.items()}
        models = wire.audit_from_records(message.content)
        with locked(self.home, wait=True):
            outbox = Outbox(self.home)
            self._hear(outbox, wire.receipts_from_body(body), str(body.get("federation", "")))
            settled = _settle(outbox, verdicts, self.home / "memory", self.home_canaries)
            splits = self.splits(outbox)
            pending = splits.pending()
            audited = wire.counts_to_body(self._audited(splits, models)) if models else {}
            partition = self.context.node_config.get("partition-id")
            return wire.body_to_records(
                {
                    "examples": int(splits.present().sum()),
                    "partition": None if partition is None else str(partition),
                    **wire.requests_to_body(pending, settled),
                    **audited,
                }
            )

    def _audited(self, splits: ClientSplits, models: wire.AuditModels) -> wire.CanaryCounts | None:
        """Guess which canaries were trained on, write to the outbox what follows, and return the numbers alone."""
        canaries = splits.canaries
        if canaries is None:
            return None
        data = splits.data
        at = canaries.at.to(data.y.device)
        model = functional(self.make_model)
        correct = []
        for params in (models.before, models.after):
            scores = score_examples(model, placed(params, data.y.device), data.x[at], data.y[at])
            correct.append(canaries.tally(scores.phi, default_guesses(len(at))).correct)
        counts = wire.CanaryCounts(len(at), 2 * default_guesses(len(at)), correct[1], correct[0])
        if any(entry.id == models.request for entry in splits.outbox.entries()):
            splits.outbox.note_audit(models.request, fields_of({NATURAL: counts.judged()}))
        return counts


def _clear(memory: Path, *, stays: bool) -> None:
    """Delete what methods stored at the client, which was computed with the forgotten data.

    Args:
        memory: the directory, with one below it for each federation.
        stays: whether the client gave up samples only: then its own layers, which have been unlearned, stay.
    """
    if not memory.exists():
        return
    if not stays:
        shutil.rmtree(memory)
        return
    for folder in memory.iterdir():
        DiskMemory(folder).purge(lambda key: not is_layers_key(key))


def _settle(outbox: Outbox, verdicts: Mapping[str, str], memory: Path, canaries: HomeCanaries) -> tuple[str, ...]:
    """Write the server's verdicts to the outbox, and delete the client's memory when a request has been served.

    Args:
        outbox: the client's requests.
        verdicts: "served" or the reason of a refusal, by request id.
        memory: the directory of what methods store at the client, which was computed with the forgotten data.
        canaries: whose coins are deleted once the whole client has been forgotten.

    Returns:
        The ids of all verdicts, which the reply confirms.
    """
    entries = {entry.id: entry for entry in outbox.entries()}
    for request, verdict in verdicts.items():
        if request not in entries:
            continue
        entry = entries[request]
        if verdict == "served" and entry.status != "served":  # before the outbox says so: a crash lets it be done again
            _clear(memory, stays=entry.kind == "samples")
            if entry.kind == "client":
                canaries.forget()
        outbox.settle(request, verdict)
    return tuple(verdicts)
