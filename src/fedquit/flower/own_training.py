# SPDX-License-Identifier: Apache-2.0
"""Erasure in an app that keeps its own training: the client's side.

    app = erasable(app, model=make_model, data=load_data, unlearning=Unlearning(lr=1e-4))

The app's own train and evaluate functions stay, with their optimizer, DataLoader or Trainer. Two messages come beside
them: `query.fedquit_own` asks which requests the owner has filed and reports what became of others, and
`train.fedquit_own` lets the client unlearn the global model on the data to forget. `fedquit.flower.Forgetting` sends
them from the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from fedquit.distill.batches import Data, mapped
from fedquit.distill.unlearning import check_rate, unlearn
from fedquit.errors import FedquitError, InputError, RequestError
from fedquit.flower.outbox import WITHDRAWN, Entry, Kind, Outbox, note_contact, require_id

ACTION = "fedquit_own"
TRAIN = f"train.{ACTION}"
QUERY = f"query.{ACTION}"
BODY = "fedquit"  # the key of JSON in a ConfigRecord
REQUEST_KEY = "fedquit-request"  # in the configuration of an unlearning: the id of the owner's request, or ""
WEIGHT_KEY = "fedquit-weight"  # and the name of the metric that counts examples
COUNTED = "num-examples"
FROZEN: Mapping[str, Any] = MappingProxyType({"norm": "frozen", "dropout": False})

ModuleOf = Callable[[Context], nn.Module]
OwnDataOf = Callable[[Context], Data]
HomeOf = Callable[[Context], Path]
Load = Callable[[nn.Module, dict[str, Tensor]], object]
Dump = Callable[[nn.Module], Mapping[str, Tensor]]
T_co = TypeVar("T_co", covariant=True)


class Mod(Protocol):
    """What Flower wraps around an app's functions."""

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message], /
    ) -> Message:
        """Answer a message, or pass it on."""


@dataclass(frozen=True)
class Unlearning:
    """How a client unlearns the global model: FedQUIT's round at the client, by `fedquit.unlearn`.

    Attributes:
        lr: the learning rate.
        epochs: passes over the data to forget.
        options: other arguments of `fedquit.unlearn`, such as `optimizer`, `batch_size`, `forward` or `autocast`. The
            statistics of BatchNorm are kept and dropout rests, unless `norm` and `dropout` say otherwise.
        load: (model, arrays by name) puts what the server sent into the model; by default `load_state_dict`, for a
            model with PEFT adapters the adapters alone.
        dump: model -> arrays by name, the reverse.
    """

    lr: float
    epochs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    load: Load | None = None
    dump: Dump | None = None

    def __post_init__(self) -> None:
        check_rate(self.lr)

    def unlearned(self, model: nn.Module, arrays: ArrayRecord, data: Data) -> ArrayRecord:
        """The arrays that the server sent, unlearned on the data.

        Args:
            model: the app's network, with any weights.
            arrays: of the global model.
            data: what to forget.

        Raises:
            InputError: if arrays and network do not fit each other.
        """
        sent = arrays.to_torch_state_dict()
        (self.load or load_arrays)(model, sent)
        student = unlearn(model, data, lr=self.lr, epochs=self.epochs, **{**FROZEN, **self.options})
        dumped = self.dump(student) if self.dump else dumped_like(student, sent)
        missing = sorted(set(sent) - set(dumped))
        if missing:
            raise InputError(f"`dump` leaves out {missing[0]!r}, which the server sent: return the same names.")
        return arrays_of({name: dumped[name] for name in sent})


def load_arrays(model: nn.Module, arrays: Mapping[str, Tensor]) -> None:
    """Put arrays into a network: by name, by position where they are numbered, adapters into a model of PEFT.

    Args:
        model: the network.
        arrays: a state dict, or a part of one.

    Raises:
        InputError: for a name or a shape that the network does not have.
    """
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, dict(arrays))
        return
    named = dict(zip(model.state_dict(), arrays.values(), strict=True)) if _numbered(model, arrays) else dict(arrays)
    try:
        unexpected = model.load_state_dict(named, strict=False).unexpected_keys
    except RuntimeError as error:
        raise InputError(
            f"the server's arrays do not fit the network ({str(error).splitlines()[-1].strip()})."
        ) from error
    if unexpected:
        raise InputError(f"the network has no {unexpected[0]!r}, which the server sent: give `load` and `dump`.")


def dumped_like(model: nn.Module, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of a network under the names that some others have.

    Args:
        model: the network.
        arrays: what `load_arrays` was given.
    """
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        return dict(get_peft_model_state_dict(model))
    state = model.state_dict()
    if _numbered(model, arrays):
        return dict(zip(arrays, state.values(), strict=True))
    return {name: tensor for name, tensor in state.items() if name in arrays}


def _numbered(model: nn.Module, arrays: Mapping[str, Tensor]) -> bool:
    """Whether arrays have numbers for names, as those of NumPy clients have."""
    return list(arrays) == [str(n) for n in range(len(arrays))] and len(arrays) == len(model.state_dict())


def arrays_of(state: Mapping[str, Tensor]) -> ArrayRecord:
    """An ArrayRecord of a state dict; Flower has no bfloat16, which travels as float32.

    Args:
        state: tensors by name, on any device.
    """
    plain = {}
    for name, tensor in state.items():
        here = tensor.detach().cpu()
        plain[name] = here.float() if here.dtype == torch.bfloat16 else here
    return ArrayRecord(plain)


class OwnTraining:
    """The answers of one app to fedquit's messages, and a mod that gives them in an app with a `client_fn`.

    Args:
        model: the network, given the context.
        data: the client's training data, given the context: whatever `fedquit.unlearn` takes.
        home_of: the client's home.
        unlearning: how to unlearn.
    """

    def __init__(self, model: ModuleOf, data: OwnDataOf, home_of: HomeOf, unlearning: Unlearning) -> None:
        self.model = model
        self.data = data
        self.home_of = home_of
        self.unlearning = unlearning

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message], /
    ) -> Message:
        """Answer fedquit's messages and pass all others on."""
        kind = message.metadata.message_type
        if kind == QUERY:
            return self.status(message, context)
        if kind == TRAIN:
            return self.unlearn(message, context)
        if kind.partition(".")[0] == "train":
            refuse_forgotten(self.outbox(context))
        return call_next(message, context)

    def outbox(self, context: Context) -> Outbox | None:
        """The owner's requests; None for a client without a home."""
        try:
            return Outbox(self.home_of(context))
        except InputError:
            return None

    def status(self, message: Message, context: Context) -> Message:
        """Which requests are pending; what became of others is written to the outbox."""
        outbox = self.outbox(context)
        pending: list[dict[str, str]] = []
        if outbox is not None:
            note_contact(outbox.home, "")
            known = {entry.id for entry in outbox.entries()}
            verdicts = dict(body_of(message).get("verdicts", {}))
            for request, verdict in verdicts.items():
                if request in known:
                    outbox.settle(str(request), str(verdict))
            for entry in outbox.withdrawing():  # between two rounds nothing is being served
                outbox.settle(entry.id, WITHDRAWN)
            pending = [{"id": entry.id, "kind": entry.kind} for entry in outbox.pending()]
        pending.sort(key=lambda entry: entry["kind"])  # whole clients first
        return Message(with_body({"pending": pending}), reply_to=message)

    def unlearn(self, message: Message, context: Context) -> Message:
        """Unlearn the global model on the data of a request; the whole client's where it names none."""
        (key, arrays), *others = message.content.array_records.items()
        if others:
            raise InputError("the message holds several ArrayRecords: fedquit unlearns one model.")
        config = next(iter(message.content.config_records.values()), ConfigRecord())
        data = self.data(context)
        request = str(config.get(REQUEST_KEY, ""))
        outbox = self.outbox(context)
        if request and outbox is not None:
            entry = outbox.get(request)
            if entry.kind == "samples":
                data = chosen_samples(data, _positions(outbox, entry, data))
        try:
            new = self.unlearning.unlearned(self.model(context), arrays, data)
        except FedquitError as error:
            return Message(with_body({"refused": str(error)}), reply_to=message)
        counted = MetricRecord({str(config.get(WEIGHT_KEY, COUNTED)): size_of(data)})
        return Message(RecordDict({key: new, "metrics": counted}), reply_to=message)


class ErasableApp(ClientApp):  # type: ignore[misc, unused-ignore]
    """An app that answers fedquit's messages beside its own, which it leaves to the app that it was made of.

    The unlearning is registered in that app, so that the app's mods, such as local differential privacy, hold for it as
    well. The query carries no array, which such mods refuse, and goes past them.

    Args:
        app: whose functions stay as they are; more can be registered through this object.
        own: the answers.
    """

    def __init__(self, app: ClientApp, own: OwnTraining) -> None:
        super().__init__()
        self.app = app
        self.own = own
        try:
            app.train(ACTION)(own.unlearn)
        except ValueError as error:
            raise InputError(
                "this ClientApp has a client_fn, which takes no other function: "
                "write ClientApp(client_fn, mods=[fedquit.flower.erasing_mod(…), …])."
            ) from error

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        kind = message.metadata.message_type
        if kind == QUERY:
            return self.own.status(message, context)
        if kind.partition(".")[0] == "train" and kind != TRAIN:
            refuse_forgotten(self.own.outbox(context))
        return self.app(message, context)

    def train(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - Flower's own arguments
        """Register a function of the app."""
        return cast("Callable[[Any], Any]", self.app.train(*args, **kwargs))

    def evaluate(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:  # noqa: ANN401
        """Register a function of the app."""
        return cast("Callable[[Any], Any]", self.app.evaluate(*args, **kwargs))

    def query(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:  # noqa: ANN401
        """Register a function of the app."""
        return cast("Callable[[Any], Any]", self.app.query(*args, **kwargs))

    def lifespan(self) -> Callable[[Any], Any]:
        """Register the lifespan of the app."""
        return cast("Callable[[Any], Any]", self.app.lifespan())


def refuse_forgotten(outbox: Outbox | None) -> None:
    """Refuse training at a client that has been forgotten.

    Raises:
        RequestError: if it has.
    """
    entries = outbox.entries() if outbox else []
    if any(entry.kind == "client" and entry.status == "served" for entry in entries):
        raise RequestError("this client has been forgotten at its owner's request, and works no more.")


def remaining_positions(outbox: Outbox, size: int) -> list[int]:
    """The positions of the samples that may be trained on: all but those that the owner asked to be forgotten.

    Args:
        outbox: the owner's requests.
        size: how many samples there are.

    Raises:
        RequestError: if the whole client has been forgotten.
        InputError: if a request names a sample that is not there.
    """
    refuse_forgotten(outbox)
    gone: set[int] = set()
    for entry in outbox.entries():
        if entry.kind == "samples" and entry.status not in ("refused", WITHDRAWN):
            gone |= set(entry.positions)
    if gone and max(gone) >= size:
        raise InputError(
            f"{outbox.folder} has a request that names sample {max(gone)}, and there are {size} samples: give the data "
            "as it was, in the same order; what was forgotten is left out by itself."
        )
    return [position for position in range(size) if position not in gone]


def subset_remaining(dataset: Dataset[T_co], outbox: Outbox | None) -> Dataset[T_co]:
    """A dataset without the samples that the owner asked to be forgotten.

    Args:
        dataset: the client's whole data, map-style.
        outbox: the owner's requests; None for none.
    """
    if outbox is None:
        return dataset
    size = len(cast("Sized", dataset))
    left = remaining_positions(outbox, size)
    return dataset if len(left) == size else Subset(dataset, left)


def chosen_samples(data: Data, positions: Sequence[int]) -> Data:
    """Some samples of a client's data, in the form in which it came.

    Args:
        data: as `fedquit.unlearn` takes it.
        positions: of the samples.
    """
    if isinstance(data, tuple | Mapping):
        at = torch.tensor(list(positions))
        return cast("Data", mapped(data, lambda tensor: tensor[at.to(tensor.device)]))
    if isinstance(data, DataLoader):
        subset = Subset(data.dataset, list(positions))
        return DataLoader(subset, batch_size=data.batch_size, collate_fn=data.collate_fn, num_workers=data.num_workers)
    return Subset(cast("Dataset[Any]", data), list(positions))


def size_of(data: Data) -> int:
    """How many samples there are."""
    if isinstance(data, DataLoader):
        return len(cast("Sized", data.dataset))
    if isinstance(data, tuple):
        return len(data[1])
    if isinstance(data, Mapping):
        return len(next(iter(data.values())))
    return len(cast("Sized", data))


def _positions(outbox: Outbox, entry: Entry, data: Data) -> list[int]:
    """The samples of a request; those of a fraction are drawn once and written to the outbox."""
    size = size_of(data)
    if not entry.positions:
        left = remaining_positions(outbox, size)
        count = max(1, round(entry.fraction * len(left)))
        drawn = torch.randperm(len(left), generator=torch.Generator().manual_seed(int(entry.id[:12], 16)))[:count]
        entry = outbox.choose(entry.id, [left[k] for k in drawn.tolist()])
    if max(entry.positions) >= size:
        raise RequestError(f"the request names sample {max(entry.positions)}, and this client has {size}.")
    return list(entry.positions)


def with_body(body: Mapping[str, Any]) -> RecordDict:
    """Records that carry some JSON."""
    return RecordDict({BODY: ConfigRecord({"json": json.dumps(body)})})


def body_of(message: Message) -> dict[str, Any]:
    """The JSON that a message carries; empty where it has none.

    Raises:
        InputError: if it is no JSON object.
    """
    record = message.content.config_records.get(BODY)
    if record is None:
        return {}
    try:
        body = json.loads(str(record.get("json", "{}")))
    except (ValueError, RecursionError) as error:
        raise InputError(f"the message holds no JSON ({error}).") from error
    if not isinstance(body, dict):
        raise InputError("the message holds something else than a JSON object.")
    return body


def requests_in(reply: Message) -> list[tuple[str, Kind]]:
    """The requests that a client's answer to the query names: (id, kind), in its order.

    Args:
        reply: from a client, who may be anybody.

    Raises:
        InputError: if it is not what `OwnTraining.status` sends.
    """
    pending = body_of(reply).get("pending", [])
    if not isinstance(pending, list):
        raise InputError("its requests are no list.")
    return [_request_in(entry) for entry in pending]


def _request_in(entry: object) -> tuple[str, Kind]:
    if not isinstance(entry, dict):
        raise InputError("a request is no JSON object.")
    request = require_id(str(entry.get("id", "")), "request")
    kind = entry.get("kind")
    if kind not in ("client", "samples"):
        raise InputError(f"request {request} is neither for the client nor for samples.")
    return request, kind
