# SPDX-License-Identifier: Apache-2.0
r"""How fast a GPU trains networks that have no kernels of their own: a GPT, a BERT and MiT-B0, ten clients each.

    python benchmarks/general_models.py --out FOLDER                 # on a GPU, at most nine minutes
    python benchmarks/general_models.py --toy --out FOLDER           # on a CPU, at toy size

For each network: the plain loop in float32 and under autocast, the stacked engine as it is by default, with row
products and Adam's kernel (`engine.compile = "auto"` without its compiler), and compiled (`"always"`), with a profile
of the compiled steps. Each network has a process and a time limit of its own, one after the other, so that none waits
for another. FOLDER/general_models.json is written after every measurement and FOLDER/NETWORK.log as the process says
it, so that a run that is cut off leaves what it had. ResNet-18, which has kernels, is timed last at the default.

The tests that need a GPU are run alone; every failure is named at once, with its gap:

    python -u -m pytest -n 0 -v --tb=short tests/engine/test_on_a_gpu.py tests/engine/test_any_model.py \
        tests/models/test_huggingface.py -k "gpu or cuda or bfloat16_is_near" 2>&1 | tee FOLDER/tests.log
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fedquit.bench.measure import machine
from fedquit.bench.settings import Setting, Timed, cifar, engine, plain, tokens, transformer
from fedquit.engine import Precision, StackedEngine
from fedquit.engine.stacked.capture import CapturedSteps

NETWORKS = ("gpt", "bert", "mit")
LIMITS = {"gpt": 110.0, "bert": 130.0, "mit": 240.0, "resnet": 45.0}  # seconds
PLAIN_STEPS, STACKED_STEPS = 4, 24  # of each client: a plain loop takes ten to twenty times as long
PROFILED = 15  # kernels that are printed


def setting_of(name: str, device: torch.device, steps: int, *, toy: bool) -> Setting:
    """The federation of a network, with some steps of each client."""
    if name == "mit":
        return transformer(device, steps, clients=2 if toy else 10, size=32 if toy else 224)
    return tokens(device, steps, kind=name, clients=2 if toy else 10, length=16 if toy else 128)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """What `engine.compile` brings but for the compiler: row products and Adam's kernel."""
    with patch.object(StackedEngine, "_compiles", lambda *_: False):
        yield


@contextlib.contextmanager
def ways_chosen() -> Iterator[list[str]]:
    """What the engine chose for each kind of step: "compiled", or why not."""
    ways: list[str] = []
    choose = CapturedSteps._choose_way

    def noted(steps: CapturedSteps) -> None:
        choose(steps)
        ways.append(steps.why or "compiled")

    with patch.object(CapturedSteps, "_choose_way", noted):
        yield ways


class Worker:
    """One network in a process of its own."""

    def __init__(self, name: str, *, toy: bool) -> None:
        self.name, self.toy = name, toy
        self.device = torch.device("cpu" if toy else "cuda")
        self.precision: Precision = "float32" if toy else "bf16"
        self.steps = (1, 2) if toy else (PLAIN_STEPS, STACKED_STEPS)
        self.few = setting_of(name, self.device, self.steps[0], toy=toy)
        self.many = setting_of(name, self.device, self.steps[1], toy=toy)
        clients = len(self.many.data.clients)
        numbers = sum(p.numel() for p in self.many.start.values())
        tell(self.name, "setting", title=self.many.title, clients=clients, parameters=numbers)

    def plain(self) -> None:
        """The plain loops."""
        for way, bf16 in (("plain loop, float32", False), ("plain loop, bf16", True)):
            self.measure(way, plain(self.few, 1, bf16=bf16), steps=self.steps[0])

    def stacked(self) -> None:
        """The stacked engine as it is by default."""
        timed = engine(self.many, "stacked", 1, self.precision, "never")
        self.measure("stacked", timed, steps=self.steps[1])

    def products(self) -> None:
        """With row products and Adam's kernel."""
        with without_compiler():
            timed = engine(self.many, "stacked", 1, self.precision, "auto")
            self.measure("stacked, row products", timed, steps=self.steps[1])

    def compiled(self) -> None:
        """The compiled engine: its first round, the others, and what its steps spend their time on."""
        timed = engine(self.many, "stacked", 1, self.precision, "always")
        with ways_chosen() as ways:
            (seconds,) = timed.rounds(1)
        tell(self.name, "first compiled round", seconds=seconds, way=ways[-1] if ways else "no GPU")
        self.measure("stacked, compiled", timed, steps=self.steps[1], warm=0)
        if not self.toy:
            self.profile(timed)

    def measure(self, way: str, timed: Timed, steps: int, warm: int = 1, repeats: int = 3) -> None:
        """Milliseconds a step of all clients, from whole rounds; the first rounds are told apart."""
        first = timed.rounds(warm)
        step = [1000 * seconds / steps for seconds in timed.rounds(repeats)]
        accuracy = timed.setting.accuracy(timed.params)
        peak = torch.cuda.max_memory_allocated() / 2**30 if not self.toy else 0.0
        tell(self.name, way, ms_a_step=step, first_s=first, accuracy=accuracy, rounds=timed.done, peak_gib=peak)

    def profile(self, timed: Timed) -> None:
        """The kernels that take the most time of a round."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            timed.rounds(1)
        kernels = [e for e in found.key_averages() if e.self_device_time_total > 0]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in kernels)
        top = [(e.key[:90], e.count, e.self_device_time_total / 1000 / self.steps[1]) for e in kernels[:PROFILED]]
        count = sum(e.count for e in kernels) / self.steps[1]
        tell(self.name, "profile", kernels_a_step=count, ms_a_step=total / 1000 / self.steps[1], top=top)


class Resnet:
    """ResNet-18 keeps its kernels: a whole round of ten ragged clients."""

    def __init__(self, *, toy: bool) -> None:
        self.setting = cifar(torch.device("cpu" if toy else "cuda"), 1 if toy else 0)
        self.toy = toy

    def rounds(self) -> None:
        """Some rounds of the auto engine."""
        timed = engine(self.setting, "auto", 1, "float32" if self.toy else "bf16")
        with ways_chosen() as ways:
            first = timed.rounds(1)
        took = timed.rounds(1 if self.toy else 4)
        tell("resnet", "auto engine", s_a_round=took, first_s=first, way=ways[-1] if ways else "no GPU")


def release() -> None:
    """Give memory back, for the other processes."""
    if torch.cuda.is_available():
        import gc

        gc.collect()
        torch.cuda.empty_cache()


def tell(network: str, what: str, **figures: object) -> None:
    """Say a result to the driver."""
    print("RESULT " + json.dumps({"network": network, "what": what, **figures}), flush=True)


def work_on(name: str, *, toy: bool) -> None:
    """Measure one network in all ways, those that need no compiler first."""
    if name == "resnet":
        ways: list[Callable[[], None]] = [Resnet(toy=toy).rounds]
    else:
        worker = Worker(name, toy=toy)
        ways = [worker.plain, worker.stacked, worker.products, worker.compiled]
    for way in ways:
        try:
            way()
        except Exception as error:  # a way that fails must not take the others with it
            traceback.print_exc()
            tell(name, f"failed: {way.__name__}", error=f"{type(error).__name__}: {str(error)[:600]}")
        release()


class Driver:
    """Starts one process after the other, and writes what they say."""

    def __init__(self, out: Path, *, toy: bool) -> None:
        self.out, self.toy = out, toy
        self.results: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)

    def measure(self, name: str, limit: float) -> None:
        """Measure a network, for at most so many seconds."""
        command = [sys.executable, "-u", __file__, "--worker", name, *(["--toy"] * self.toy)]
        with (self.out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
            timer = threading.Timer(limit, end, [process])
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("RESULT "):
                        self.take(json.loads(line.removeprefix("RESULT ")))
                status = process.wait()
            finally:
                timer.cancel()
                end(process)
        if status:
            self.take({"network": name, "what": "ended early", "status": status, "limit_s": limit})

    def take(self, result: dict[str, Any]) -> None:
        """Write a result."""
        result["at_s"] = round(time.monotonic() - BEGAN, 1)
        self.results.append(result)
        where = machine(torch.device("cpu")) | {"torch": torch.__version__}
        if torch.cuda.is_available():
            where["gpu"] = torch.cuda.get_device_name()
        text = json.dumps({"machine": where, "results": self.results}, indent=1)
        (self.out / "general_models.json").write_text(text)
        print({k: v for k, v in result.items() if k != "top"}, flush=True)
        if result["what"] == "profile":
            print(f"{result['network']}: {result['kernels_a_step']:.0f} kernels, {result['ms_a_step']:.2f} ms a step")
            for kernel, count, ms in result["top"]:
                print(f"{ms:9.3f} ms {count:7} {kernel}", flush=True)


def end(process: subprocess.Popen[str]) -> None:
    """End a process, and the compilers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def table(results: list[dict[str, Any]]) -> str:
    """Milliseconds a step of all clients, and how many times the plain loops' speed."""
    lines = []
    for name in NETWORKS:
        ways = {r["what"]: statistics.median(r["ms_a_step"]) for r in results if _is_way(r, name)}
        wide, low = (ways.get(f"plain loop, {kind}") for kind in ("float32", "bf16"))
        for way, step in ways.items():
            ratios = [f"{plain / step:8.2f}" if plain else "       -" for plain in (wide, low)]
            lines.append(f"{name:6}{way:26}{step:12.2f} ms {' '.join(ratios)}")
    head = f"{'':6}{'':26}{'a step':>12}    {'x fp32':>8} {'x bf16':>8}"
    return "\n".join([head, *lines])


def _is_way(result: dict[str, Any], network: str) -> bool:
    return result["network"] == network and isinstance(result.get("ms_a_step"), list)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("general-models"))
    parser.add_argument("--networks", default=",".join((*NETWORKS, "resnet")))
    parser.add_argument("--limit", type=float, default=0.0, help="seconds for each network; 0: its own")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy size")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work_on(given.worker, toy=given.toy)
        return
    driver = Driver(given.out, toy=given.toy)
    for name in given.networks.split(","):
        driver.measure(name, given.limit or LIMITS[name])
        print(table(driver.results), flush=True)


BEGAN = time.monotonic()
if __name__ == "__main__":
    main()
