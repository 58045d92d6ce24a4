# SPDX-License-Identifier: Apache-2.0
"""All parts of a check, one after the other, and which of them rest on which.

A part that compares whole lives is judged only where the contract holds and the method repeats itself: what else is
wrong would be blamed on it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquit.check import comparisons, on_flower
from fedquit.check.behaviour import behaviour
from fedquit.check.contract import Trial, cost_lines, is_plain, judge_class, try_request
from fedquit.check.federation import KINDS, SmallFederation, parse_settings, recipe_for
from fedquit.check.life import Trace
from fedquit.check.report import PARTS, BehaviourLine, Findings, PartResult, Report
from fedquit.engine.stacked.replay import one_thread
from fedquit.results.words import count

QUICK_ROUNDS, FULL_ROUNDS = 3, 40  # of unlearning that are looked at
LEFT_OUT = "left out by --quick"

Tell = Callable[[str], None]


def check_method(
    name: str,
    settings: Sequence[str] = (),
    *,
    quick: bool = False,
    tell: Tell | None = None,
    folder: Path | None = None,
) -> Report:
    """Put an unlearning method through its acceptance test.

    Args:
        name: of `fedquit list methods`, or `package.module:Class`.
        settings: of its options, each as `key=value`, such as `lr=1e-3` or `preset=authors`.
        quick: leave out what is slow: processes that are killed, Flower, and the run on the embedded data.
        tell: is told which part begins.
        folder: for what the lives store; else a temporary one.

    Returns:
        What was found. `report.kept` says whether no contract is broken.

    Raises:
        InputError: for a method that cannot be imported or built, or an option that cannot be used.
        UnknownNameError: for a name or an option that does not exist.
    """
    began = time.perf_counter()
    method = parse_settings(name, settings)
    federation = SmallFederation(recipe_for(method), most_rounds=QUICK_ROUNDS if quick else FULL_ROUNDS)
    # Networks so small are no faster on several threads, and much slower where other processes want the cores.
    with one_thread(), tempfile.TemporaryDirectory(prefix="fedquit-check-", dir=folder or _in_memory()) as place:
        suite = _Suite(federation, method, Path(place), tell or (lambda part: None), quick=quick)
        report = suite.run()
    return dataclasses.replace(report, seconds=round(time.perf_counter() - began, 1))


def _in_memory() -> Path | None:
    """A folder in RAM, where the system has one: what a life stores is small, and outlives no check."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else None


class _Suite:
    """One check."""

    def __init__(
        self, federation: SmallFederation, method: Mapping[str, Any], folder: Path, tell: Tell, *, quick: bool
    ) -> None:
        self.federation = federation
        self.method = method
        self.folder = folder
        self.tell = tell
        self.quick = quick
        self.findings = Findings()
        self.trials: list[Trial] = []
        self.notes: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.lives: dict[str, Trace] = {}
        self.lines: list[BehaviourLine] = []

    def run(self) -> Report:
        """All parts."""
        self._contract()
        for part in ("determinism", "resume", "engines", "flower", "behaviour"):
            self._begin(part)
        method = self.federation.build_method()
        return Report(
            method=self.federation.name,
            options={f.name: _plain(getattr(method, f.name)) for f in dataclasses.fields(method)},
            form="quick" if self.quick else "full",
            parts=tuple(self._part(name) for name in PARTS),
            requests=tuple(trial.outcome for trial in self.trials),
            costs=tuple(line for trial in self.trials if trial.served for line in cost_lines(trial)),
            behaviour=tuple(self.lines),
        )

    def _part(self, name: str) -> PartResult:
        if name in self.skipped and not self.findings.of(name):
            return PartResult.skipped(name, self.skipped[name])
        part = PartResult.judged(name, self.notes.get(name, ""), self.findings.all)
        return dataclasses.replace(part, status="shown") if name == "behaviour" and part.status == "kept" else part

    def _begin(self, part: str) -> None:
        """Judge a part, or say why not."""
        if self.quick and part in ("flower", "behaviour"):
            self.skipped[part] = LEFT_OUT
        elif not self._served:
            self.skipped[part] = "no kind of request was served to its end"
        elif self.findings.of("contract"):
            self.skipped[part] = "not judged until the contract is kept"
        elif self.findings.of("determinism"):
            self.skipped[part] = "not judged until the method repeats itself"
        else:
            self.tell(part)
            getattr(self, f"_{part}")()

    @property
    def _served(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.served]

    def _lives(self, most: int = 1) -> list[tuple[str, Trace]]:
        """The lives that others are compared with: in the quick form at most so many.

        Nobody looks on: counting FLOPs can change the last bits of a result.
        """
        kinds = [trial.kind for trial in self._served]
        chosen = kinds[:most] if self.quick else kinds
        for kind in chosen:
            if kind not in self.lives:
                folder = self._folder_for("first", kind)
                life = comparisons.lead_again(self.federation, kind, folder, self.findings, cache=self._cache)
                self.lives |= {kind: life} if life else {}
        return [(kind, self.lives[kind]) for kind in chosen if kind in self.lives]

    @property
    def _cache(self) -> Path | None:
        """Where trainings are shared: not where the method has a part in them."""
        return None if self.federation.build_method().shapes_training else self.folder / "cache"

    def _folder_for(self, part: str, kind: str, more: str = "") -> Path:
        return self.folder / part / kind.replace(" ", "-") / more

    # The parts.

    def _contract(self) -> None:
        self.tell("contract")
        judge_class(self.federation.build_method(), self.findings)
        for kind in KINDS:
            folder = self._folder_for("contract", kind)
            flops = not self.quick or not self._served
            trial = try_request(self.federation, kind, folder, self.findings, cache=self._cache, flops=flops)
            self.trials.append(trial)
        if not any(trial.outcome.outcome != "refused" for trial in self.trials):
            self.findings.add(
                "requests", "none", "all kinds of request", "the method refuses every one", "serve at least one kind"
            )
        questions = sum(trial.questions for trial in self.trials)
        wanted = max((trial.life.rounds for trial in self.trials if trial.life), default=0)
        cut = self.federation.most_rounds
        seen = f"the first {cut} of {count(wanted, 'round')}" if wanted > cut else count(wanted, "round")
        self.notes["contract"] = (
            f"{count(questions, 'question')} for {count(len(self.trials), 'request')}, {seen} of unlearning"
        )
        outcomes = [f"{trial.kind}: {trial.outcome.outcome}" for trial in self.trials]
        self.notes["requests"] = "; ".join(outcomes)
        if self._served:
            self.notes["costs"] = "bytes, participations, epochs and FLOPs: what the engine did, and what is charged"
        else:
            self.skipped["costs"] = "no kind of request was served to its end"

    def _determinism(self) -> None:
        for kind, life in self._lives():
            folder = self._folder_for("determinism", kind)
            comparisons.judge_determinism(self.federation, kind, folder, life, self.findings)
        again = ", ".join(kind for kind, _ in self._lives())
        self.notes["determinism"] = f"served again with other global seeds, compared bit for bit: {again}"

    def _resume(self) -> None:
        kills = 0
        for kind, life in self._lives()[:: 1 if self.quick else 3]:
            kills += comparisons.judge_resume(
                self.federation,
                kind,
                self._folder_for("resume", kind),
                life,
                self.findings,
                cache=self._cache,
                thorough=not self.quick,
            )
        note = f"cut off {count(kills, 'time')}, in every round"
        if self.quick:
            note += "; processes that are killed: " + LEFT_OUT
        elif not self.findings.of("resume"):
            kind, life = self._lives()[0]
            folder = self._folder_for("killed", kind)
            real = comparisons.judge_real_kills(self.federation, kind, folder, life, self.findings)
            note += f"; {real} {'process' if real == 1 else 'processes'} killed with SIGKILL"
        self.notes["resume"] = note

    def _engines(self) -> None:
        deviations: dict[str, float] = {}
        for engine in comparisons.ENGINES:
            for kind, life in self._lives(2):  # several clients too, of other sizes: engines pad
                folder = self._folder_for("engines", kind, engine)
                deviation = comparisons.judge_engine(
                    self.federation, kind, engine, folder, life, self.findings, cache=self._cache
                )
                deviations[engine] = max(deviation, deviations.get(engine, 0.0))
        apart = ", ".join(f"{engine} {deviation:.0e}" for engine, deviation in deviations.items())
        self.notes["engines"] = (
            f"largest relative distance from the sequential engine: {apart} (at most {comparisons.TOLERANCE:g})"
        )

    def _flower(self) -> None:
        reason = on_flower.why_not(self.federation.build_method())
        wanted = max(life.rounds for _, life in self._lives())
        if not reason and wanted > FULL_ROUNDS:
            reason = f"{wanted} rounds of unlearning would take too long: give fewer with --set"
        if reason:
            self.skipped["flower"] = reason
            return
        federation = dataclasses.replace(self.federation, clients=on_flower.CLIENTS, most_rounds=0)
        worst = 0.0
        for kind, _ in self._lives():
            deviation = on_flower.judge_on_flower(federation, kind, self._folder_for("flower", kind), self.findings)
            worst = max(worst, deviation)
        served = ", ".join(kind for kind, _ in self._lives())
        self.notes["flower"] = (
            f"largest distance from the simulator: {worst:.0e} (at most {on_flower.TOLERANCE:g}): {served}"
        )

    def _behaviour(self) -> None:
        samples = self._served[0].kind.startswith("samples")
        with tempfile.TemporaryDirectory(prefix="fedquit-check-") as folder:
            self.lines = behaviour(self.method, Path(folder), self.findings, samples=samples)
        self.notes["behaviour"] = (
            "figures of one seed and one client, not judged: the error of such a verdict is not known; only a model "
            "no better than guessing would be"
        )


def _plain(value: object) -> Any:  # noqa: ANN401 - for JSON
    """An option as JSON has it; infinity, and what no recipe can express, in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if is_plain(value) else repr(value)
