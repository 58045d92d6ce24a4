# SPDX-License-Identifier: Apache-2.0
"""Measure what each method leaves of a model: accuracy after every round of its unlearning and of its recovery.

    python benchmarks/unlearned_accuracy.py settings/cifar100-lda --targets 0,1 --cache CACHE --out FILE \
        --methods fedquit,mode/swapped,pga:lr=1e-3 [--sweep fedosd.lr=1e-4,1e-3] [--set key=value ...] [--seconds 540]

Original is trained once, with all methods attached, and serves every method and target; it lies in `--cache`, as do
the Retrains, unless `--retrain DIR` names a reference bundle (results/references). Recovery stops at Retrain's test
accuracy. A sweep runs a method with each of the values and without recovery, unless `--recover-sweeps`. The file is
written after every run, and the same command goes on with the runs that it does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedquit.audit.evaluation import Evaluation
from fedquit.core import ClientId, Federation, Params, Request, State, Trained
from fedquit.core.method import Method
from fedquit.methods import METHODS
from fedquit.running.recipe import Recipe, load
from fedquit.running.setup import Setup, build_setup
from fedquit.running.simulation import Simulation
from fedquit.running.training_cache import Federated, Silent, train
from fedquit.utils.files import read_json, write_json
from fedquit.utils.version import code_version

Point = dict[str, float]


@dataclass(frozen=True)
class Variant:
    """A method with a preset and options; `recovers` says whether its recovery is run too."""

    name: str
    preset: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    recovers: bool = True

    @property
    def section(self) -> dict[str, Any]:
        """The recipe's section [method]."""
        return {"name": self.name, **({"preset": self.preset} if self.preset else {}), **self.options}

    @classmethod
    def read(cls, text: str) -> Variant:
        """Of a method, its preset and options: `mode/swapped`, `fedosd:recovery=projected:lr=1e-3`."""
        words, *given = text.split(":")
        name, _, preset = words.partition("/")
        fields = vars(METHODS[name]())
        pairs = [option.split("=") for option in given]
        return cls(name, preset, {key: type(fields[key])(value) for key, value in pairs})


def swept(text: str, recovers: bool) -> list[Variant]:
    """The variants of a sweep: `fedosd.lr=1e-4,1e-3`."""
    what, _, values = text.partition("=")
    name, _, option = what.partition(".")
    kind = type(getattr(METHODS[name](), option))
    return [Variant(name, "", {option: kind(float(value))}, recovers) for value in values.split(",")]


def observed(method: Method, points: list[Point], evaluation: Evaluation) -> Method:
    """The same method, whose model is evaluated after every round of its unlearning."""
    cls = type(method)

    def unlearn(self: Method, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        after = cls.unlearn(self, fed, state, trained, request)
        points.append({"round": after.round, **accuracies(evaluation, after.params)})
        return after

    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    watching: Method = type(cls.__name__, (cls,), {"unlearn": unlearn})(**values)
    return watching


def accuracies(evaluation: Evaluation, params: Params) -> Point:
    """Test and forget accuracy, in percent."""
    return {f"{name}_acc": evaluation.accuracy(name, params) or 0.0 for name in ("test", "forget")}


class Measurements:
    """Runs the variants of one setting, and writes what comes out.

    Args:
        recipe: of the setting.
        variants: of all methods that are to run.
        options: of the command line.
    """

    def __init__(self, recipe: Recipe, variants: Sequence[Variant], options: argparse.Namespace) -> None:
        self.recipe = recipe
        self.variants = variants
        self.options = options
        self.setup = build_setup(recipe)
        stored = read_json(options.out) if options.out.exists() else {}
        self.runs: list[dict[str, Any]] = stored.get("runs", [])
        self.references: dict[str, Any] = stored.get("references", {})

    def with_method(self, variant: Variant) -> Setup:
        """The setup with another method, on the same data and captured graphs."""
        own = self.recipe.method if variant.name == self.recipe.method_name else {}
        recipe = dataclasses.replace(self.recipe, method={**own, **variant.section})
        return dataclasses.replace(self.setup, recipe=recipe, method=recipe.build_method())

    def original(self) -> Federated:
        """Original, with all methods attached that must see the training."""
        chosen = {v.name: self.with_method(v).method for v in self.variants}
        attached = {name: method for name, method in chosen.items() if method.shapes_training}
        first = Request((self.options.targets[0],))
        return train(
            self.setup, self.setup.data, self.options.cache, reporter=Silent(), attached=attached, request=first
        )

    def retrained(self, target: ClientId, evaluation: Evaluation) -> Point:
        """Retrain's accuracies: of its record where there is one."""
        if self.options.retrain:
            name = f"retrain-client{target}-seed{self.recipe.seed}"
            record = read_json(self.options.retrain / f"{name}.json")  # of a reference bundle
            row = record["rows"][str(target)][-1]
            return {name: row[name] for name in ("test_acc", "forget_acc")}
        data = self.setup.data.mark(Request((target,))).after(Request((target,)))
        progress = train(self.setup, data, self.options.cache, reporter=Silent()).progress
        return accuracies(evaluation, progress.state.params)

    def run(self, deadline: float) -> None:
        """All variants for all targets, as far as time allows."""
        began = time.monotonic()
        original = self.original()
        print(f"Original: {time.monotonic() - began:.0f} s", flush=True)
        for target in self.options.targets:
            request = Request((target,))
            marked = self.setup.data.mark(request)
            evaluation = Evaluation(
                self.setup.evaluation_model, marked, request, (), self.recipe.seed, None, self.setup.passes
            )
            retrained = self.retrained(target, evaluation)
            before = accuracies(evaluation, original.trained.params)
            self.references[str(target)] = {"original": before, "retrained": retrained}
            print(f"client {target}: Original {before}, Retrain {retrained}", flush=True)
            for variant in self.variants:
                known = any(r["target"] == target and r["method"] == variant.section for r in self.runs)
                if not known and time.monotonic() < deadline:
                    self.runs.append(self._run(variant, request, original, evaluation, retrained["test_acc"]))
                    self.write()

    def _run(
        self, variant: Variant, request: Request, original: Federated, evaluation: Evaluation, level: float
    ) -> dict[str, Any]:
        """Unlearn, and recover until the test accuracy reaches `level`."""
        began = time.monotonic()
        setup = self.with_method(variant)
        unlearning: list[Point] = []
        recovery: list[Point] = []
        setup = dataclasses.replace(setup, method=observed(setup.method, unlearning, evaluation))
        folder = Path(tempfile.mkdtemp(dir=self.options.cache))
        simulation = Simulation(setup, folder, journal=False)  # a run that is killed begins again
        simulation.adopt(original)
        unlearned = simulation.unlearn(request, self.setup.data.mark(request))
        rounds = simulation.recovery(unlearned)
        for progress in rounds.rounds if variant.recovers else ():
            recovery.append({"round": progress.state.round, **accuracies(evaluation, progress.state.params)})
            over = recovery[-1]["test_acc"] >= level or progress.state.round >= self.options.most
            if over:
                break
        rounds.memories.close()
        shutil.rmtree(folder)
        after = accuracies(evaluation, unlearned.progress.state.params)
        seconds = round(time.monotonic() - began, 1)
        last = recovery[-1] if recovery else after
        words = " ".join(str(value) for value in variant.section.values())
        print(
            f"{words}, client {request.clients[0]}: unlearned {after['test_acc']:.1f} / {after['forget_acc']:.1f}, "
            f"{max(len(recovery) - 1, 0)} rounds, {last['test_acc']:.1f} / {last['forget_acc']:.1f}, {seconds} s",
            flush=True,
        )
        return {
            "method": variant.section,
            "target": request.clients[0],
            "unlearned": after,
            "unlearning": unlearning,
            "recovery": recovery,
            "reached": bool(recovery) and last["test_acc"] >= level,
            "seconds": seconds,
            "code": code_version(),
        }

    def write(self) -> None:
        """Write all that has been measured."""
        content = {
            "schema": 1,
            "kind": "unlearned accuracy",
            "recipe": self.recipe.to_dict(),
            "computed": {
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "precision": self.setup.precision,
            },
            "references": self.references,
            "runs": self.runs,
        }
        write_json(self.options.out, content)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--targets", required=True, type=lambda text: [int(t) for t in text.split(",")])
    parser.add_argument("--methods", default="")
    parser.add_argument("--sweep", action="append", default=[])
    parser.add_argument("--recover-sweeps", action="store_true")
    parser.add_argument("--most", type=int, default=30, help="rounds of recovery")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--retrain", type=Path, help="the folder with records of Retrain")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    variants = [Variant.read(text) for text in options.methods.split(",") if text]
    variants += [v for text in options.sweep for v in swept(text, options.recover_sweeps)]
    options.cache.mkdir(parents=True, exist_ok=True)
    measurements = Measurements(load(options.recipe, options.set), variants, options)
    measurements.run(deadline)
    measurements.write()


if __name__ == "__main__":
    main()
