# SPDX-License-Identifier: Apache-2.0
"""The cost model of FedQUIT's paper: bytes, operations and storage of each method, by its formulas.

Nothing is measured here. `running.costs` and `running.flops` count what a run really does; this
module computes what the paper would have printed for it, so that its tables can be compared with
ours (docs/costs.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedquit.errors import InputError
from fedquit.utils.names import lookup

RESNET18_BYTES = 4 * 11_220_132  # 100 classes; the tables use it for 10 classes too
MIT_B0_BYTES = 4 * 3_319_392  # the encoder alone
LSTM_BYTES = 1_674_500  # fitted: the table leaves 1.67437e6 to 1.67468e6, a little less than 4 * 419,265
RESNET18_FLOPS = 150_000_000  # for one example in one epoch
MIT_B0_FLOPS = 1_700_000_000
LSTM_EPOCH_FLOPS = 789_200_000_000  # fitted, for a client's epoch: the table leaves 7.8906e11 to 7.8928e11
HEAD_FLOPS = 4  # for a weight of FedAU's head and an example

PGA_EPOCHS = 5
MODE_ROUNDS, MODE_DEGRADATION_ROUNDS = 10, 6
FEDOSD_ROUNDS = 10
FEDERASER_EPOCHS = 0.5


@dataclass(frozen=True)
class Setting:
    """A federation, as the tables describe it.

    Attributes:
        clients: in the federation.
        clients_per_round: that take part in a round.
        rounds: of training.
        model_bytes: size of the model; of one with frozen parameters, of what is trained, which alone travels.
        epoch_flops: operations of one client's pass over its data.
        head_weights: weights of the last layer, for FedAU.
        head_biases: biases of the last layer, for FedAU.
        examples: of a client, for FedAU.
    """

    clients: int
    clients_per_round: int
    rounds: int
    model_bytes: int
    epoch_flops: float
    head_weights: int = 0
    head_biases: int = 0
    examples: int = 0

    def stay(self, leaving: int, samples: float = 0.0) -> int:
        """Return how many clients take part in a round after a request."""
        return min(self.clients_per_round, self.clients if samples else self.clients - leaving)


@dataclass(frozen=True)
class Charge:
    """The cost of a phase, in bytes sent and floating-point operations."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Bill:
    """The cost of a request: the unlearning, the recovery, and the storage during training."""

    unlearning: Charge
    recovery: Charge
    storage_bytes: int
    in_total: bool = True  # whether the tables add the unlearning to their totals

    @property
    def total(self) -> Charge:
        """The total that the tables print after recovery."""
        return self.unlearning + self.recovery if self.in_total else self.recovery


@dataclass(frozen=True)
class _Asked:
    setting: Setting
    leaving: int
    samples: float

    @property
    def stay(self) -> int:
        return self.setting.stay(self.leaving, self.samples)

    def work(self, participations: float, epochs: float | None = None) -> Charge:
        """Charge two transfers of the model a participation, and an epoch unless `epochs` is given."""
        epochs = participations if epochs is None else epochs
        return Charge(2 * self.setting.model_bytes * participations, self.setting.epoch_flops * epochs)


def _fedquit(a: _Asked) -> Charge:
    return a.work(a.leaving, a.leaving * (a.samples or 1))  # the teacher's forward is free


def _mode(a: _Asked) -> Charge:
    return a.work(MODE_DEGRADATION_ROUNDS * a.stay + MODE_ROUNDS * a.setting.clients_per_round)


def _fedau(a: _Asked) -> Charge:
    """Charge one client's head in every round, and the work of all staying clients on it."""
    s = a.setting
    work = HEAD_FLOPS * s.head_weights * s.examples * a.stay * s.rounds
    return Charge(2 * 4 * (s.head_weights + s.head_biases) * s.rounds, work)


def _federaser(a: _Asked) -> Charge:
    replayed = a.setting.rounds * a.stay
    return a.work(replayed, FEDERASER_EPOCHS * replayed)


@dataclass(frozen=True)
class _Method:
    unlearning: Callable[[_Asked], Charge]
    models: Callable[[Setting], int] = lambda setting: 1  # stored
    recovers: bool = True
    in_total: bool = True


PAPER: dict[str, _Method] = {
    "original": _Method(lambda a: a.work(a.setting.rounds * a.setting.clients_per_round), recovers=False),
    "retrain": _Method(lambda a: a.work(a.setting.rounds * a.stay), recovers=False),
    "federaser": _Method(_federaser, lambda s: s.rounds * s.clients, recovers=False),
    "pga": _Method(lambda a: a.work(1, PGA_EPOCHS), lambda s: s.clients + 1),
    "mode": _Method(_mode, lambda s: 2),
    "fedau": _Method(_fedau, in_total=False),
    "not": _Method(lambda a: Charge()),
    "fedosd": _Method(lambda a: a.work(FEDOSD_ROUNDS * a.stay), lambda s: 2),
    "fedquit": _Method(_fedquit),
}


def bill(
    method: str, setting: Setting, recovery_rounds: float = 0.0, *, leaving: int = 1, samples: float = 0.0
) -> Bill:
    """Return what the paper charges a method.

    Args:
        method: a name from `PAPER`.
        setting: the federation; `SETTINGS` has those of the paper.
        recovery_rounds: rounds of recovery; a mean over several runs may be a fraction.
        leaving: how many clients leave.
        samples: the fraction of their data that they ask to forget; 0 means all of it.

    Raises:
        UnknownNameError: for a method that the tables do not have.
        InputError: for numbers that cannot be used, or rounds of recovery for a method that has
            none.
    """
    rule = lookup(PAPER, method, "method")
    asked = _Asked(setting, leaving, samples)
    if not 0 < leaving < setting.clients or not 0 <= samples < 1 or recovery_rounds < 0:
        raise InputError(
            f"leaving={leaving}, samples={samples}, recovery_rounds={recovery_rounds}: at least one client leaves and "
            "one stays, samples are a part below 1, and rounds are not negative."
        )
    if recovery_rounds and not rule.recovers:
        raise InputError(f"{method} has no recovery: give 0 recovery rounds.")
    storage = rule.models(setting) * setting.model_bytes
    return Bill(rule.unlearning(asked), asked.work(recovery_rounds * asked.stay), storage, rule.in_total)


def printed(value: float) -> str:
    """Format a number as the tables print it: three digits."""
    return f"{value:.2e}".replace("e+", "e").replace("e0", "e") if value else "0"


def times_cheaper(retrain: float, cost: float) -> float:
    """Divide Retrain's cost *as printed* (1.62e11 for 1.6157e11) by the method's."""
    return float(printed(retrain)) / cost


def budget(setting: Setting, part: float) -> float:
    """Return a fraction of the bytes of Retrain, which are again taken as printed."""
    return part * float(printed(bill("retrain", setting).total.bytes))


_CIFAR = Setting(10, 10, 200, RESNET18_BYTES, 5_000 * RESNET18_FLOPS, 512 * 100, 100, 5_000)
_MIT = Setting(10, 10, 50, MIT_B0_BYTES, 5_000 * MIT_B0_FLOPS, 256 * 100, 100, 5_000)

SETTINGS: dict[str, Setting] = {
    "cifar100-iid": _CIFAR,
    "cifar100": _CIFAR,
    "cifar10": _CIFAR,
    "cifar100-mit": _MIT,
    # The tables use as many examples as for CIFAR, although CUB-200 has some 600 for each of 10
    # clients.
    "cub200": Setting(10, 10, 50, MIT_B0_BYTES, 5_000 * MIT_B0_FLOPS, 256 * 200, 200, 5_000),
    "cifar100-100": Setting(100, 10, 600, RESNET18_BYTES, 500 * RESNET18_FLOPS),
    "cub200-100": Setting(100, 10, 200, MIT_B0_BYTES, 60 * MIT_B0_FLOPS),
    "shakespeare": Setting(80, 8, 200, LSTM_BYTES, LSTM_EPOCH_FLOPS),
}
