# SPDX-License-Identifier: Apache-2.0
"""The messages of the one-run audit: two models to a client that leaves, and how its guesses on its canaries did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedquit.audit.canaries import NATURAL
from fedquit.core import Params
from fedquit.errors import InputError
from fedquit.flower.wire.errors import InvalidMessage
from fedquit.flower.wire.messages import BODY, REPLY, SET, body_from_records, require_count
from fedquit.flower.wire.tensors import params_from_record, params_to_record
from fedquit.inference.one_run import OneRunAudit, Tally, audit

AUDIT = "audit"  # the key of a status query that asks for the audit, and of its reply; part of the format
MOST_GUESSES = 10**5  # that a client may claim: the bounds take time and memory in proportion


@dataclass(frozen=True)
class AuditModels:
    """What a client that leaves is asked to audit.

    Attributes:
        request: the id of its request.
        before: the model that the request found.
        after: the model after the recovery.
    """

    request: str
    before: Params
    after: Params


@dataclass(frozen=True)
class CanaryCounts:
    """A client's guesses on its canaries: numbers, and no examples.

    Attributes:
        canaries: m.
        guesses: r.
        correct: v, under the model after the recovery.
        correct_before: v under the model that the request found.
    """

    canaries: int
    guesses: int
    correct: int
    correct_before: int

    def judged(self) -> OneRunAudit:
        """What follows from them, by the simulator's rule."""
        after = Tally(self.canaries, self.guesses, self.correct)
        before = Tally(self.canaries, self.guesses, self.correct_before)
        return audit({NATURAL: after}, original={NATURAL: before})[NATURAL]


def audit_to_records(models: AuditModels) -> RecordDict:
    """A status query that asks for an audit, still without a nonce."""
    body = {"verdicts": {}, AUDIT: models.request}
    records = {f"{SET}0": params_to_record(models.before), f"{SET}1": params_to_record(models.after)}
    return RecordDict({REPLY: ConfigRecord({BODY: json.dumps(body)}), **records})


def audit_from_records(content: RecordDict) -> AuditModels | None:
    """What a status query asks to audit; None where it asks for nothing of the kind."""
    request = body_from_records(content).get(AUDIT)
    if request is None:
        return None
    try:
        before, after = (params_from_record(content.array_records[f"{SET}{i}"]) for i in (0, 1))
    except KeyError as error:
        raise InvalidMessage("the query asks for an audit and lacks a model.") from error
    return AuditModels(str(request), before, after)


def counts_to_body(counts: CanaryCounts | None) -> dict[str, Any]:
    """The part of a reply's JSON body that answers an audit; None from a client without canaries."""
    return {AUDIT: None if counts is None else dataclasses.asdict(counts)}


def counts_from_body(body: Mapping[str, Any]) -> CanaryCounts | None:
    """How a client's guesses did; None where it has no canaries. Raises `InvalidMessage` for impossible numbers."""
    given = body.get(AUDIT)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidMessage("its audit is not an object.")
    names = [field.name for field in dataclasses.fields(CanaryCounts)]
    counts = CanaryCounts(**{name: require_count(given.get(name), f"canaries ({name})") for name in names})
    if counts.guesses > MOST_GUESSES:
        raise InvalidMessage(f"it claims {counts.guesses} guesses, and {MOST_GUESSES} are the most.")
    try:
        counts.judged()
    except InputError as error:
        raise InvalidMessage(f"its audit is impossible: {error}") from error
    return counts
