# SPDX-License-Identifier: Apache-2.0
"""The contract: what a method may read, keep, change and return, for every kind of request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from fedquit.check.federation import SmallFederation, described
from fedquit.check.life import PHASES, Trace, lead_life
from fedquit.check.observation import LifeOver, Observer
from fedquit.check.report import CostLine, Findings, RequestOutcome
from fedquit.check.rules import Fault
from fedquit.core.method import Method
from fedquit.errors import AbsentClientError, NonFiniteError, RequestError
from fedquit.running.costs import Costs

SHORTEST_REASON = 40  # characters of a sentence that says why, and what to do instead
FLOPS_WITHIN = 0.02  # of what was computed; the meter leaves out elementwise work
COUNTED = ("down_bytes", "up_bytes", "participations", "client_epochs", "server_epochs")


@dataclass(frozen=True)
class Trial:
    """What became of one kind of request.

    Attributes:
        kind: of the request.
        outcome: whether it was served.
        life: as far as it went; None where the method refused at once.
        questions: that the method asked.
    """

    kind: str
    outcome: RequestOutcome
    life: Trace | None = None
    questions: int = 0

    @property
    def served(self) -> bool:
        """Whether the life was led to its end."""
        return self.outcome.outcome == "served"


def judge_class(method: Method, findings: Findings) -> None:
    """Note where a method is no frozen dataclass of hyper-parameters."""
    cls = type(method)
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        findings.add(
            "contract",
            "frozen",
            f"class {cls.__name__}",
            "it is no frozen dataclass, so that its options are no keys of a recipe and its attributes can change",
            "write @dataclass(frozen=True) above the class",
        )
    for f in fields(method):
        value = getattr(method, f.name)
        if not is_plain(value):
            findings.add(
                "contract",
                "field",
                f"class {cls.__name__}, field {f.name}",
                f"it is a {type(value).__name__}, which no recipe can express",
                "give a method hyper-parameters only: numbers, strings, truth values, and tuples of them",
            )


def is_plain(value: object) -> bool:
    """Whether a recipe can express a value."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, tuple | list):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def try_request(
    federation: SmallFederation,
    kind: str,
    folder: Path,
    findings: Findings,
    *,
    cache: Path | None = None,
    flops: bool = True,
) -> Trial:
    """Lead a federation through one kind of request, and note every contract that is broken.

    Args:
        federation: that the method is checked in.
        kind: of the request.
        folder: for what it stores.
        findings: where violations are noted.
        cache: of trainings, where the method has no part in them; else each life has its own.
        flops: whether to count FLOPs as they are computed.
    """
    request = federation.request(kind)
    work = federation.setup(federation.build_method()).flops
    observer = Observer(kind, request, federation.clients, findings, work, counts=flops)
    life = Trace()
    outcome = RequestOutcome(kind, "served")
    try:
        lead_life(federation, kind, folder, cache=cache, spectator=observer, life=life)
    except RequestError as error:
        if isinstance(error, AbsentClientError):
            outcome = RequestOutcome(kind, "failed", str(error))
        else:
            outcome = _refused(kind, error, observer)
    except LifeOver:
        outcome = RequestOutcome(kind, "failed", "a contract is broken")
    except Exception as error:  # a user's method may raise anything
        outcome = RequestOutcome(kind, "failed", described(error))
        if not observer.explained:
            _note_error(error, observer)
    if outcome.outcome == "served":
        _judge_costs(observer, life)
    return Trial(kind, outcome, life, observer.questions)


def _refused(kind: str, error: RequestError, observer: Observer) -> RequestOutcome:
    sentence = str(error)
    if len(sentence) < SHORTEST_REASON or "\n" in sentence.strip():
        seen = f"refuses the request with {sentence!r}, which does not explain it"
        advice = "say in one sentence why the method does not define such a request, and what to use instead"
        observer.note("requests", Fault("sentence", seen, advice))
    return RequestOutcome(kind, "refused", sentence)


def _note_error(error: Exception, observer: Observer) -> None:
    if isinstance(error, NonFiniteError):
        seen, advice = str(error).partition(":")[0], "lower the learning rate or clip the gradient"
        observer.note("contract", Fault("finite", seen, advice))
        return
    words = described(error)
    advice = "serve the request, or raise a RequestError in `check` that says why not"
    observer.note("requests", Fault(f"error {words}", f"ends in {words}", advice))


def _judge_costs(observer: Observer, life: Trace) -> None:
    """Compare what the method is charged with what its engine did."""
    for phase in ("unlearn", "recover"):
        words = PHASES[phase]
        charged, done = life.costs[words], observer.charged.get(phase, Costs())
        flops = charged.client_flops + charged.server_flops
        observer.enter(words)
        fault = _fault_of_charge(charged, done) or _fault_of_flops(flops, observer.computed.get(phase, 0))
        observer.note("costs", fault)
    observer.enter("training")
    if life.kept_bytes > life.promised_bytes:
        seen = (
            f"keeps {life.kept_bytes:,} bytes at the server during the training, where `history_bytes` and one model "
            f"make {life.promised_bytes:,}"
        )
        advice = "return the bytes from `history_bytes`, so that a run that does not fit is refused before it begins"
        observer.note("costs", Fault("history", seen, advice))


def _fault_of_charge(charged: Costs, done: Costs) -> Fault | None:
    """All that the engine did for a method is charged.

    Args:
        charged: by the meter around the federation that the method has.
        done: by a meter at the engine.
    """
    for name in COUNTED:
        at_engine, at_method = getattr(done, name), getattr(charged, name)
        if at_engine != at_method:
            seen = f"{at_engine:,} {name.replace('_', ' ')} are counted at the engine, and {at_method:,} are charged"
            advice = "ask clients through the `fed` of the hook alone, so that the meter sees it"
            return Fault("around", seen, advice)
    return None


def _fault_of_flops(charged: int, computed: int) -> Fault | None:
    """The FLOPs that are charged are those that were computed."""
    if abs(charged - computed) <= FLOPS_WITHIN * max(charged, computed):
        return None
    seen = (
        f"{computed:,} FLOPs were computed and {charged:,} are charged: the meter counts what `loss` computes, the "
        "same for every batch of a size"
    )
    advice = "let no other hook run the network, and `loss` do the same work in every step"
    return Fault("flops", seen, advice)


def cost_lines(trial: Trial) -> list[CostLine]:
    """What each phase of a request was charged."""
    lines = []
    names = {f.name for f in dataclasses.fields(CostLine)}
    for phase, costs in trial.life.costs.items() if trial.life else ():
        rounds = max((n for words, n in trial.life.states if words == phase), default=0) if trial.life else 0
        values = {name: value for name, value in dataclasses.asdict(costs).items() if name in names}
        lines.append(CostLine(trial.kind, "unlearning" if phase == "unlearning" else "recovery", rounds, **values))
    return lines
