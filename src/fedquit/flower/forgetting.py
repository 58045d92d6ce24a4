# SPDX-License-Identifier: Apache-2.0
"""Erasure in an app that keeps its own strategy: the server's side.

    strategy = Forgetting(FedAdam(...))
    strategy.start(grid, initial_arrays, num_rounds=20)

A round that finds requests is an unlearning: the clients that leave unlearn the global model, and their replies are
the new model, past the strategy, to which a pseudo-gradient would be meaningless. The strategy then begins anew, since
what it has kept, such as FedAdam's moments, holds the updates of the erased client. The rounds that follow are the
recovery; the strategy never sees erased nodes again.

What is served is written down, and its owner told, only once the app can have stored the unlearned model. With an
`evaluate_fn` that is when the next round begins or the training ends; without one the app says so, by `kept`. A server
that is killed before serves the request again.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvgM, Result, Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from fedquit.errors import InputError, StoreError
from fedquit.flower import twice
from fedquit.flower.outbox import now
from fedquit.flower.own_training import COUNTED, QUERY, REQUEST_KEY, TRAIN, WEIGHT_KEY, body_of, requests_in, with_body

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
POLL_SECONDS = 60.0
SERVED = "served"
Requests = Callable[[int], Iterable[int]]
NewStrategy = Callable[[], Strategy]


@dataclass(frozen=True)
class Erasure:
    """A request that was served.

    Attributes:
        node: whose data.
        kind: `client` or `samples`.
        request: the owner's, or "" for one of the operator.
        round: in which the global model was unlearned.
        at: when (ISO 8601).
    """

    node: int
    kind: str
    request: str
    round: int
    at: str


@dataclass
class _Pending:
    node: int
    kind: str = "client"
    request: str = ""
    failures: int = 0


@dataclass
class _State:
    """What a server that is started again must know: who is erased, and who has not been told yet."""

    erased: set[int] = field(default_factory=set)
    served: list[Erasure] = field(default_factory=list)
    untold: dict[int, dict[str, str]] = field(default_factory=dict)
    recovered: int = 0  # rounds of the strategy after the last unlearning
    refused: set[tuple[int, str]] = field(default_factory=set)  # node and request: those that failed too often

    def to_dict(self) -> dict[str, Any]:
        untold = {str(node): verdicts for node, verdicts in self.untold.items()}
        served = [asdict(one) for one in self.served]
        return {
            "erased": sorted(self.erased),
            "served": served,
            "untold": untold,
            "recovered": self.recovered,
            "refused": sorted(self.refused),
        }

    @staticmethod
    def read(path: Path) -> _State:
        stored = twice.read_json_mended(path, "who was forgotten", say=lambda sentence: log(WARNING, "%s", sentence))
        try:
            untold = {int(node): dict(verdicts) for node, verdicts in stored["untold"].items()}
            served = [Erasure(**one) for one in stored["served"]]
            refused = {(int(node), str(request)) for node, request in stored.get("refused", ())}
            erased = {int(node) for node in stored["erased"]}
            return _State(erased, served, untold, int(stored.get("recovered", 0)), refused)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path} is not what this strategy writes ({error!r}): restore it from a backup, or give another path. "
                "Do not delete it: it says who was forgotten."
            ) from error


class Forgetting(Strategy):  # type: ignore[misc, unused-ignore]
    """A strategy that serves erasure requests, around one that does everything else.

    Args:
        strategy: any strategy of the message API, with its own settings; or a function that makes one, where it cannot
            be copied.
        requests: round -> the nodes that the operator wants erased; the owners' own requests are asked for besides.
        poll: whether to ask the nodes, before each round, for requests that their owners have filed.
        state: a file in which to keep who is erased, so that a server that is started again still knows; None keeps it
            in memory. Give an absolute path: Flower chooses the folder in which an app runs. It is kept twice, with a
            checksum.
        recovery: how many rounds should follow an unlearning; `start` warns where fewer did.
        tries: how often a client that fails to unlearn is asked before its request is refused. Between two unlearnings
            of one node lies a round of the strategy, so that nobody can take all rounds.

    Raises:
        InputError: if the strategy cannot be copied.
    """

    def __init__(
        self,
        strategy: Strategy | NewStrategy,
        *,
        requests: Requests | None = None,
        poll: bool = True,
        state: Path | str | None = None,
        recovery: int = 1,
        tries: int = 3,
    ) -> None:
        self._make = _maker(strategy)
        self.strategy = self._make()
        self.requests = requests
        self.poll = poll
        self.recovery = recovery
        self.tries = tries
        self._path = None if state is None else Path(state)
        self._state = _State.read(self._path) if self._path and twice.kept(self._path) else _State()
        self._pending: list[_Pending] = []
        self._serving: list[_Pending] = []
        self._resting: set[int] = set()  # nodes that unlearned, or failed to, since the strategy's last round
        self._sent: ArrayRecord | None = None
        self._unsaved = False
        self._verdicts: dict[int, dict[str, str]] = {}  # for owners, once the app has stored the model
        self._keeps = True  # whether `evaluate_fn` stores each round's model
        self._grid: Grid | None = None  # of the last `start`

    @property
    def erased(self) -> frozenset[int]:
        """The nodes that take no part any more."""
        return frozenset(self._state.erased)

    @property
    def served(self) -> tuple[Erasure, ...]:
        """All requests that were served, in their order."""
        return tuple(self._state.served)

    @property
    def pending(self) -> tuple[int, ...]:
        """The nodes whose requests wait: they came after the last round, or their client was away or failed."""
        return tuple(one.node for one in self._pending)

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Forgetting, around %s", type(self.strategy).__name__)
        self.strategy.summary()

    def start(self, *args: Any, **kwargs: Any) -> Result:  # noqa: ANN401 - those of `Strategy.start`
        """Run all rounds, as the strategy inside would; an unlearning takes one of them.

        After the last round the nodes are asked once more. What they ask for then is `pending`, and served by the next
        `start` with the model of this one. Without `evaluate_fn`, call `kept` once the model is stored.
        """
        given = inspect.signature(super().start).bind(*args, **kwargs).arguments
        self._grid = given["grid"]
        self._keeps = given.get("evaluate_fn") is not None
        result = super().start(*args, **kwargs)
        self._settle()
        if self.poll:
            self._ask(self._grid)
        if self._unsaved and self._state.served:
            log(
                WARNING,
                "what was served is not written down yet, and its owners are not told: call `kept()` once the model is "
                "stored, or give `start` an `evaluate_fn` that stores it.",
            )
        if self._pending:
            log(
                WARNING,
                "%d request(s) wait after the last round: start again with this model and at least %d rounds.",
                len(self._pending),
                1 + self.recovery,
            )
        if self._state.served and self._state.recovered < self.recovery:
            log(
                WARNING,
                "%d rounds followed the unlearning in round %d, and %d should: train further before the model is used.",
                self._state.recovered,
                self._state.served[-1].round,
                self.recovery,
            )
        return result

    def kept(self) -> None:
        """Say that the model of the last `start` is stored: what was served is written down, and its owners are told.

        Not needed where `evaluate_fn` stores the model after every round.
        """
        self._keeps = True
        self._settle()
        if self.poll and self._grid is not None and self._state.untold:
            self._ask(self._grid)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """An unlearning where a request is pending, else a round of the strategy without erased nodes.

        Args:
            server_round: from 1.
            arrays: of the global model.
            config: for the clients.
            grid: the nodes.
        """
        self._settle()
        if self.poll:
            self._ask(grid)
        for node in self.requests(server_round) if self.requests else ():
            self._add(_Pending(node))
        present = set(grid.get_node_ids())
        self._serving = [one for one in self._pending if one.node in present - self._resting]
        self._resting = {one.node for one in self._serving} | (self._resting if self._serving else set())
        self._sent = arrays
        if self._serving:
            return [self._message(one, server_round, arrays, config) for one in self._serving]
        self._warn_of_few(len(present - self._state.erased))
        visible = VisibleNodes(grid, self._state.erased)
        return self.strategy.configure_train(server_round, arrays, config, visible)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The unlearned model, or what the strategy makes of the replies.

        Args:
            server_round: from 1.
            replies: of the clients.
        """
        arrived = list(replies)
        if self._serving:
            return self._unlearned(server_round, arrived)
        arrays, metrics = self.strategy.aggregate_train(server_round, arrived)
        if arrays is not None:
            arrays = with_statistics(arrays, self._contents(arrived), self._weight_key, _optimizes(self.strategy))
            self._state.recovered += 1
            self._unsaved = bool(self._state.served)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does, without erased nodes.

        Args:
            server_round: from 1.
            arrays: of the global model.
            config: for the clients.
            grid: the nodes.
        """
        visible = VisibleNodes(grid, self._state.erased)
        return self.strategy.configure_evaluate(server_round, arrays, config, visible)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy does.

        Args:
            server_round: from 1.
            replies: of the clients.
        """
        return self.strategy.aggregate_evaluate(server_round, replies)

    @property
    def _weight_key(self) -> str:
        return str(getattr(self.strategy, "weighted_by_key", COUNTED))

    def _message(self, one: _Pending, server_round: int, arrays: ArrayRecord, config: ConfigRecord) -> Message:
        """An unlearning has one ArrayRecord and one ConfigRecord, as mods for clipping and noise require."""
        settings = {**config, REQUEST_KEY: one.request, WEIGHT_KEY: self._weight_key, "server-round": server_round}
        keys = [getattr(self.strategy, key, word) for key, word in _RECORDS.items()]
        content = RecordDict({keys[0]: arrays, keys[1]: ConfigRecord(settings)})
        log(INFO, "configure_train: node %d unlearns (%s)", one.node, one.kind)
        return Message(content=content, message_type=TRAIN, dst_node_id=one.node)

    def _ask(self, grid: Grid) -> None:
        """Ask the nodes for requests, and tell them what became of theirs."""
        nodes = [node for node in grid.get_node_ids() if node not in self._state.erased or node in self._state.untold]
        messages = []
        for node in nodes:
            content = with_body({"verdicts": self._state.untold.get(node, {})})
            messages.append(Message(content=content, message_type=QUERY, dst_node_id=node))
        for reply in grid.send_and_receive(messages, timeout=POLL_SECONDS):
            node = reply.metadata.src_node_id
            if reply.has_error():  # an app that is not erasable, or none that answers: its owner cannot have asked
                continue
            if self._state.untold.pop(node, None) is not None:
                self._unsaved = True
            if node in self._state.erased:
                continue
            try:
                asked = requests_in(reply)
            except InputError as error:
                log(WARNING, "what node %d answers to the question for requests cannot be used: %s", node, error)
                continue
            self._drop_withdrawn(node, {request for request, _ in asked})
            for request, kind in asked:
                self._add(_Pending(node, kind, request))
        self._save()

    def _drop_withdrawn(self, node: int, asked: set[str]) -> None:
        """Forget the requests of a node that its owner has taken back."""
        for one in [one for one in self._pending if one.node == node]:
            if one.request and one.request not in asked:
                self._pending.remove(one)

    def _add(self, one: _Pending) -> None:
        """Remember a request, once; one node at a time has one, a whole client's before those for samples."""
        served = {(erasure.node, erasure.request) for erasure in self._state.served}
        is_known = one.request and (one.node, one.request) in served | self._state.refused
        if is_known or one.node in self._state.erased or any(other.node == one.node for other in self._pending):
            return
        self._pending.append(one)

    def _unlearned(
        self, server_round: int, replies: Sequence[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean of the unlearned models, by examples; requests whose client failed stay pending."""
        serving = {one.node: one for one in self._serving}
        self._serving = []
        usable: dict[int, RecordDict] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            why = "" if node in serving else "it was not asked"
            why = why or _fault(reply, self._sent, self._weight_key)
            if why:
                self._failed(serving.get(node), node, why)
            else:
                usable[node] = reply.content
        if not usable:
            return None, None
        arrays = averaged(list(usable.values()), self._weight_key)
        self.strategy = self._make()  # its moments held updates of those who leave
        for node in usable:
            one = serving[node]
            self._pending.remove(one)
            self._state.served.append(Erasure(node, one.kind, one.request, server_round, now()))
            if one.kind == "client":
                self._state.erased.add(node)
            if one.request:
                self._verdicts.setdefault(node, {})[one.request] = SERVED
        self._state.recovered = 0
        self._unsaved = True  # until the app has had the model
        return arrays, MetricRecord({"fedquit-unlearned": len(usable)})

    def _failed(self, one: _Pending | None, node: int, why: str) -> None:
        log(WARNING, "the reply of node %d to the unlearning cannot be used: %s", node, why)
        if one is None:
            return
        one.failures += 1
        if one.failures >= self.tries:
            self._pending.remove(one)
            if one.request:
                self._state.refused.add((node, one.request))
                self._verdicts.setdefault(node, {})[one.request] = f"the unlearning failed: {why}"
                self._unsaved = True

    def _contents(self, replies: Sequence[Message]) -> list[RecordDict]:
        return [reply.content for reply in replies if not reply.has_error()]

    def _warn_of_few(self, nodes: int) -> None:
        """Flower waits without end for nodes that a strategy requires and that were erased."""
        needed = max(int(getattr(self.strategy, key, 0)) for key in ("min_available_nodes", "min_train_nodes"))
        if self._state.erased and nodes < needed:
            log(
                WARNING,
                "%d nodes are left after the erasure and the strategy waits for %d: lower min_available_nodes and "
                "min_train_nodes, or let nodes join.",
                nodes,
                needed,
            )

    def _settle(self) -> None:
        """Write down what was served, whose owners may then be told, if the app has stored the model."""
        if not self._keeps:
            return
        for node, verdicts in self._verdicts.items():
            self._state.untold.setdefault(node, {}).update(verdicts)
        self._verdicts = {}
        self._save()

    def _save(self) -> None:
        """Write the state, which never runs ahead of the model that the app has stored."""
        if not self._keeps:
            return
        if self._path and self._unsaved:
            twice.write_json_twice(self._path, self._state.to_dict())
        self._unsaved = False


_RECORDS = {"arrayrecord_key": "arrays", "configrecord_key": "config"}


class VisibleNodes(Grid):  # type: ignore[misc, unused-ignore]
    """A grid without some of its nodes: what strategies sample from.

    Args:
        grid: with all nodes.
        hidden: the ids of those that are not to be seen.
    """

    def __init__(self, grid: Grid, hidden: Iterable[int]) -> None:
        self._grid = grid
        self._hidden = frozenset(hidden)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are left."""
        return [node for node in self._grid.get_node_ids() if node not in self._hidden]

    def get_nodes(self) -> Iterable[Any]:
        """The nodes that are left, with what the grid knows of them."""
        return [node for node in self._grid.get_nodes() if node.node_id not in self._hidden]

    def set_run(self, run: Any) -> None:  # noqa: ANN401 - Flower's signature
        """As the grid does."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:  # noqa: ANN401 - Flower's signature
        """The grid's run."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:  # noqa: ANN401 - Flower's signature
        """As the grid does."""
        return self._grid.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid does."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the grid does."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As the grid does."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def is_statistic(name: str, values: np.ndarray[Any, Any]) -> bool:
    """Whether an array is no weight: a running statistic of a normalisation, or a counter.

    Args:
        name: in the state dict.
        values: its numbers.
    """
    return name.rpartition(".")[2] in STATISTICS or not np.issubdtype(values.dtype, np.floating)


def with_statistics(arrays: ArrayRecord, replies: Sequence[RecordDict], key: str, optimized: bool) -> ArrayRecord:
    """The aggregated arrays with usable statistics: counters at their maximum, and no optimizer's step on a variance.

    Args:
        arrays: as the strategy aggregated them.
        replies: of the clients, from which they come.
        key: the metric that counts examples.
        optimized: whether the strategy takes optimizer steps, so that its running means and variances are not theirs.
    """
    if not replies or any(len(reply.array_records) != 1 for reply in replies):
        return arrays
    plain = _values(replies[0])
    if set(plain) != set(arrays):
        return arrays
    means: dict[str, Array] | None = None
    corrected: dict[str, Array] = {}
    for name, values in plain.items():
        counter = not np.issubdtype(values.dtype, np.floating)
        if is_statistic(name, values) and (counter or optimized):
            means = means or dict(averaged(replies, key))
            corrected[name] = means[name]
    return ArrayRecord({name: corrected.get(name, array) for name, array in arrays.items()}) if corrected else arrays


def averaged(replies: Sequence[RecordDict], key: str) -> ArrayRecord:
    """The mean of models by examples, in each array's own type; counters are their maximum.

    Args:
        replies: each with one ArrayRecord and the metric.
        key: the metric that counts examples.
    """
    weights = np.array([_weight(reply, key) for reply in replies], dtype=np.float64)
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(replies), 1 / len(replies))
    models = [_values(reply) for reply in replies]
    mean: dict[str, Array] = {}
    for name, first in models[0].items():
        stacked = [model[name] for model in models]
        if np.issubdtype(first.dtype, np.floating):
            total = sum(share * values.astype(np.float64) for share, values in zip(weights, stacked, strict=True))
            mean[name] = Array(np.asarray(total).astype(first.dtype))
        else:
            mean[name] = Array(np.asarray(np.maximum.reduce(stacked), dtype=first.dtype))
    return ArrayRecord(mean)


def _values(content: RecordDict) -> dict[str, np.ndarray[Any, Any]]:
    record = next(iter(content.array_records.values()))
    return {name: array.numpy() for name, array in record.items()}


def _weight(content: RecordDict, key: str) -> float:
    for record in content.metric_records.values():
        counted = record.get(key)
        if isinstance(counted, int | float):
            return float(counted)
    return 0.0


def _fault(reply: Message, sent: ArrayRecord | None, key: str) -> str:
    """Why a reply to an unlearning cannot be used; "" if it can."""
    if reply.has_error():
        return str(reply.error.reason)
    try:
        refused = body_of(reply).get("refused")
    except InputError as error:
        return str(error)
    if refused:
        return str(refused)
    if len(reply.content.array_records) != 1:
        return "it holds no model"
    counted = 0 < _weight(reply.content, key) < math.inf
    return _fault_of_arrays(reply.content, sent) if counted else f"it does not say how many examples there were ({key})"


def _fault_of_arrays(content: RecordDict, sent: ArrayRecord | None) -> str:
    try:
        values = _values(content)
    except Exception as error:  # the bytes are a client's, and there are many ways to be wrong
        return f"its arrays cannot be read ({error})"
    expected = {name: array.numpy().shape for name, array in (sent or {}).items()}
    if {name: array.shape for name, array in values.items()} != expected:
        return "its arrays are not those of the global model"
    floats = [array for array in values.values() if np.issubdtype(array.dtype, np.floating)]
    return "" if all(np.isfinite(array).all() for array in floats) else "its arrays hold NaN or infinity"


def _maker(strategy: Strategy | NewStrategy) -> NewStrategy:
    """A function that makes the strategy as it was at the beginning."""
    if not isinstance(strategy, Strategy):
        return strategy
    try:
        pristine = copy.deepcopy(strategy)
    except Exception as error:
        raise InputError(
            f"the strategy {type(strategy).__name__} cannot be copied ({error}), and it must begin anew after an "
            "erasure: give a function that makes it, Forgetting(lambda: …)."
        ) from error
    return lambda: copy.deepcopy(pristine)


def _optimizes(strategy: Strategy) -> bool:
    """Whether a strategy, or the one inside it, takes optimizer steps on the aggregated arrays."""
    inside: object = strategy
    while inside is not None:
        if isinstance(inside, FedOpt | FedAvgM):
            return True
        inside = getattr(inside, "strategy", None)
    return False
