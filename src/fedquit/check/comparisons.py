# SPDX-License-Identifier: Apache-2.0
"""Lives that must be the same: repeated, with other global seeds, killed in every round, and on other engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from fedquit.check.digest import seeded
from fedquit.check.federation import SmallFederation, described
from fedquit.check.life import Trace, first_difference, largest_deviation, lead_life
from fedquit.check.report import Findings
from fedquit.check.rules import DRAWING

TOLERANCE = 1e-9  # between engines, in float64: they add up in another order, over all rounds
OTHER_SEED = 20_240_607  # of the global generators, in the life that is repeated
ENGINES = ("threaded", "stacked")
KILLED_PHASES = ("training", "unlearning", "recovery")


class Killed(BaseException):
    """The run is cut off here."""


def judge_determinism(federation: SmallFederation, kind: str, folder: Path, first: Trace, findings: Findings) -> None:
    """Lead the same life again, with other global seeds.

    Args:
        federation: that the method is checked in.
        kind: of the request.
        folder: for what it stores.
        first: the life so far.
        findings: where violations are noted.
    """
    with seeded(OTHER_SEED):
        again = lead_again(federation, kind, folder, findings)
    place = first_difference(first.fingerprints(), again.fingerprints()) if again else ""
    if place:
        findings.add(
            "determinism",
            "again",
            f"{place} ({kind})",
            "the same request, served twice, gives two models",
            f"{DRAWING}, and depend on no clock",
        )


def lead_again(
    federation: SmallFederation, kind: str, folder: Path, findings: Findings, *, cache: Path | None = None
) -> Trace | None:
    """Lead a life that was led to its end before; where it now ends in an error, that is noted.

    Args:
        federation: that the method is checked in.
        kind: of the request.
        folder: for what it stores.
        findings: where violations are noted.
        cache: of trainings, where the method has no part in them.
    """
    try:
        return lead_life(federation, kind, folder, cache=cache)
    except Exception as error:  # a user's method may raise anything
        seen = f"the same request, served a second time, ends in {described(error)}"
        advice = "let nothing depend on what happened before in the process"
        findings.add("determinism", "error", kind, seen, advice)
        return None


# Kills.


def judge_resume(
    federation: SmallFederation,
    kind: str,
    folder: Path,
    first: Trace,
    findings: Findings,
    *,
    cache: Path | None,
    thorough: bool,
) -> int:
    """Kill the life in every round, go on with a new object from what is on disk, and compare.

    Args:
        federation: that the method is checked in.
        kind: of the request.
        folder: for what it stores.
        first: the life without a kill.
        findings: where violations are noted.
        cache: of trainings, where the method has no part in them; else they are killed too.
        thorough: kill when a round begins, when its first reply is here, and when it is over; else when it begins,
            and in turns when its first reply is here or when it is over.

    Returns:
        How often it was killed.
    """
    killed: list[tuple[str, int, str]] = []

    def interrupt(phase: str, round: int, moment: str) -> None:
        if (phase, round, moment) in killed:
            return
        in_turn = moment == ("reply", "end")[round % 2]
        if thorough or moment == "begin" or in_turn:
            killed.append((phase, round, moment))
            raise Killed

    life = Trace()
    while True:
        try:
            lead_life(federation, kind, folder, cache=cache, interrupt=interrupt, life=life)
        except Killed:
            continue
        except Exception as error:  # a user's method may raise anything
            _note_resume(
                findings, f"{_last(killed)} ({kind})", f"a run that was killed there ends in {described(error)}"
            )
            break
        place = first_difference(first.fingerprints(), life.fingerprints())
        if place:
            _note_resume(findings, f"{place} ({kind})", "a run that was killed in every round gives another model here")
        break
    return len(killed)


def _last(killed: list[tuple[str, int, str]]) -> str:
    return f"{killed[-1][0]} round {killed[-1][1] + 1}" if killed else "the beginning"


def _note_resume(findings: Findings, where: str, seen: str) -> None:
    advice = "carry what a later round needs in `state.next(w, name=params)`, as sets of tensors, and nowhere else"
    findings.add("resume", "resume", where, seen, advice)


def judge_real_kills(federation: SmallFederation, kind: str, folder: Path, first: Trace, findings: Findings) -> int:
    """Kill processes of their own with SIGKILL, once in each phase, in its middle, and let the last one end.

    Args:
        federation: that the method is checked in.
        kind: of the request.
        folder: for what it stores.
        first: the life without a kill.
        findings: where violations are noted.

    Returns:
        How many processes were killed.
    """
    kills = 0
    for phase in (*KILLED_PHASES, ""):
        rounds = max((number for words, number in first.states if words == phase), default=0)
        has_a_part = phase != "training" or federation.build_method().shapes_training
        if phase and not (rounds and has_a_part):
            continue
        done = _process(federation, kind, folder, phase, rounds // 2)
        if phase and done.returncode == -signal.SIGKILL:
            kills += 1
            continue
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            seen = f"a process that was to go on from the one that was killed ends with {done.returncode}: {last}"
            _note_resume(findings, f"{phase or 'the end'} ({kind})", seen)
            return kills
        place = first_difference(first.fingerprints(), json.loads(done.stdout.splitlines()[-1]), partial=True)
        if place:
            seen = f"a process that goes on from {kills} that were killed gives another model here"
            _note_resume(findings, f"{place} ({kind})", seen)
        return kills
    return kills


def _process(
    federation: SmallFederation, kind: str, folder: Path, phase: str, round: int
) -> subprocess.CompletedProcess[str]:
    """A process that leads a life, or goes on with it, until it kills itself in a round of a phase ("" for none)."""
    job = {
        "method": dict(federation.recipe.method),
        "most_rounds": federation.most_rounds,
        "kind": kind,
        "folder": str(folder),
        "kill_in": [phase, round],
        "threads": torch.get_num_threads(),
    }
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    command = [sys.executable, "-m", "fedquit.check.comparisons", json.dumps(job)]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def main(job: dict[str, Any]) -> None:
    """Lead a life, or go on with it, and kill this process in a round of a phase.

    Args:
        job: the method, the kind of request, the folder, the phase and round to die in, and torch's threads.
    """
    from fedquit.check.federation import recipe_for

    torch.set_num_threads(job["threads"])

    def interrupt(phase: str, round: int, moment: str) -> None:
        if [phase, round] == job["kill_in"]:
            os.kill(os.getpid(), signal.SIGKILL)

    federation = SmallFederation(recipe_for(job["method"]), most_rounds=job["most_rounds"])
    life = lead_life(federation, job["kind"], Path(job["folder"]), interrupt=interrupt)
    sys.stdout.write(json.dumps(life.fingerprints()) + "\n")


# Engines.


def judge_engine(
    federation: SmallFederation,
    kind: str,
    engine: str,
    folder: Path,
    first: Trace,
    findings: Findings,
    *,
    cache: Path | None,
) -> float:
    """Lead the life on another engine, and compare every state.

    Args:
        federation: that the method is checked in.
        kind: of the request.
        engine: its name.
        folder: for what it stores.
        first: the life on the sequential engine.
        findings: where violations are noted.
        cache: of trainings, where the method has no part in them.

    Returns:
        The largest deviation, relative to the largest parameter.
    """
    advice = (
        "let the hooks of a task use no branch on values of tensors (torch.where instead) and treat each example alone"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says where it has to fall back to a loop
            other = lead_life(federation, kind, folder, cache=cache, engine=engine)
    except Exception as error:  # a user's method may raise anything
        findings.add("engines", engine, f"engine {engine} ({kind})", f"the life ends in {described(error)}", advice)
        return float("inf")
    deviation, place = largest_deviation(first, other)
    if not deviation <= TOLERANCE:
        seen = f"its parameters lie {deviation:.1e} away from those of the sequential engine ({TOLERANCE:g} is allowed)"
        findings.add("engines", engine, f"engine {engine}, {place} ({kind})", seen, advice)
    return deviation


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
