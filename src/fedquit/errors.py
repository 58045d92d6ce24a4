# SPDX-License-Identifier: Apache-2.0
"""The errors that a user can correct.

FedquitError                 the command line prints its one sentence and exits with 2
├── InputError (ValueError)  data, labels, logits, shapes or numbers that cannot be used
│   ├── NoExamplesError      a mean over clients of which none has an example
│   └── RepliesDifferError    replies with other tensors than each other, which cannot be averaged
├── UnknownNameError         a method, teacher, key, … that does not exist; names the nearest one that does
├── RequestError             an erasure request that cannot be served as it stands
│   └── AbsentClientError    a method asks a client that takes no part: the method's fault, not the request's
├── NonFiniteError           NaN or infinity where weights or logits should be
├── UnreachableError         clients that must answer and did not
└── StoreError               a checkpoint, run folder or disk that cannot be read or written
"""

from __future__ import annotations

from collections.abc import Sequence


class FedquitError(Exception):
    """A fault with one clear sentence that says what to do next."""


class InputError(FedquitError, ValueError):
    """Data, labels, logits, shapes or numbers that cannot be used."""


class NoExamplesError(InputError):
    """A mean over clients of which none has an example."""


class RepliesDifferError(InputError):
    """Replies with other tensors than each other: clients may send what they like."""


class UnknownNameError(FedquitError, ValueError):
    """A name that is in none of the tables."""


class RequestError(FedquitError, ValueError):
    """An erasure request that cannot be served as it stands."""


class AbsentClientError(RequestError):
    """A method asks a client that takes no part."""


class NonFiniteError(FedquitError, ArithmeticError):
    """NaN or infinity where weights or logits should be."""


class StoreError(FedquitError, OSError):
    """A checkpoint, run folder or disk that cannot be read or written."""


class UnreachableError(FedquitError):
    """Clients that must answer did not by their deadline, or gave no answer that can be used."""

    def __init__(self, sentence: str, clients: Sequence[int]) -> None:
        super().__init__(sentence)
        self.clients = tuple(clients)
