# SPDX-License-Identifier: Apache-2.0
"""How fast a GPU trains networks that have no kernels of their own: MiT-B0, a GPT and a BERT, ten clients each.

    python benchmarks/general_models.py --out FOLDER                 # on a GPU, about three minutes
    python benchmarks/general_models.py --toy --out FOLDER           # on a CPU, at toy size

For each network: the plain loop in float32 and under autocast, the stacked engine as it is without a compiler (and
without what this benchmark was written for: row products and Adam's kernel), and compiled. Plain loops are measured
first, one network after the other, while nothing else runs; then all networks compile at once, each in a process of
its own; then each is measured alone. FOLDER/general_models.json is written after every measurement, so that a run that
is cut off leaves what it had. The table and the profile of the compiled steps are printed last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import torch

from fedquit.bench.measure import machine
from fedquit.bench.settings import Setting, Timed, cifar, engine, plain, tokens, transformer
from fedquit.engine.stacked import work
from fedquit.engine.stacked.capture import CapturedSteps

NETWORKS = ("mit", "gpt", "bert")
PLAIN_STEPS, STACKED_STEPS = 4, 24  # of each client: a plain loop takes ten to twenty times as long
PROFILED = 15  # kernels that are printed


def setting_of(name: str, device: torch.device, steps: int, *, toy: bool) -> Setting:
    """The federation of a network, with some steps of each client."""
    if name == "mit":
        return transformer(device, steps, clients=2 if toy else 10, size=32 if toy else 224)
    return tokens(device, steps, kind=name, clients=2 if toy else 10, length=16 if toy else 128)


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Without row products and without Adam's kernel."""
    with (
        patch.object(work, "ProductOps", lambda **_: contextlib.nullcontext()),
        patch.object(work.Work, "_has_update_kernel", lambda _: False),
    ):
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
    """One network in a process of its own, which does what it is told on its standard input."""

    def __init__(self, name: str, *, toy: bool, out: Path) -> None:
        self.name, self.toy, self.out = name, toy, out
        self.device = torch.device("cpu" if toy else "cuda")
        self.steps = (1, 2) if toy else (PLAIN_STEPS, STACKED_STEPS)
        self.compiled: Timed | None = None
        self.few = setting_of(name, self.device, self.steps[0], toy=toy)
        self.many = setting_of(name, self.device, self.steps[1], toy=toy)
        clients = len(self.many.data.clients)
        numbers = sum(p.numel() for p in self.many.start.values())
        tell(self.name, "setting", title=self.many.title, clients=clients, parameters=numbers)

    def plain(self) -> None:
        """The plain loops."""
        for way, bf16 in (("plain loop, float32", False), ("plain loop, bf16", True)):
            self.measure(way, plain(self.few, 1, bf16=bf16), steps=self.steps[0])

    def eager(self) -> None:
        """The stacked engine without a compiler."""
        precision = "float32" if self.toy else "bf16"
        with as_before():
            before = engine(self.many, "stacked", 1, precision, "never")  # type: ignore[arg-type]
            self.measure("stacked, as before", before, steps=self.steps[1], repeats=2)
        del before
        now = engine(self.many, "stacked", 1, precision, "never")  # type: ignore[arg-type]
        self.measure("stacked, not compiled", now, steps=self.steps[1], repeats=2)
        release()

    def compile(self) -> None:
        """The first round of the compiled engine."""
        self.compiled = engine(self.many, "stacked", 1, "float32" if self.toy else "bf16", "always")
        with ways_chosen() as ways:
            (seconds,) = self.compiled.rounds(1)
        tell(self.name, "first round", seconds=seconds, way=ways[-1] if ways else "no GPU")

    def compiled_rounds(self) -> None:
        """The compiled engine's rounds, and what its steps spend their time on."""
        assert self.compiled is not None
        self.measure("stacked, compiled", self.compiled, steps=self.steps[1], warm=0)
        if not self.toy:
            self.profile(self.compiled)

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


def work_on(name: str, *, toy: bool, out: Path) -> None:
    """Do what the driver says, a line each, until it says nothing more."""
    if name == "resnet":
        resnet = Resnet(toy=toy)
        commands: dict[str, Callable[[], None]] = {"rounds": resnet.rounds}
    else:
        worker = Worker(name, toy=toy, out=out)
        commands = {
            "plain": worker.plain,
            "eager": worker.eager,
            "compile": worker.compile,
            "compiled": worker.compiled_rounds,
        }
    print("DONE", flush=True)
    for line in sys.stdin:
        try:
            commands[line.strip()]()
        except Exception as error:  # a way that fails must not take the others with it
            tell(name, f"failed: {line.strip()}", error=f"{type(error).__name__}: {str(error)[:600]}")
        print("DONE", flush=True)


class Driver:
    """Starts the workers, tells them what to do, and writes what they say."""

    def __init__(self, out: Path, limit: float, *, toy: bool) -> None:
        self.out, self.toy = out, toy
        self.end = time.monotonic() + limit
        self.results: list[dict[str, Any]] = []
        self.processes: dict[str, subprocess.Popen[str]] = {}
        out.mkdir(parents=True, exist_ok=True)
        timer = threading.Timer(limit, self.stop)
        timer.daemon = True
        timer.start()

    def start(self, name: str) -> None:
        """Start a worker."""
        command = [sys.executable, __file__, "--worker", name, "--out", str(self.out), *(["--toy"] * self.toy)]
        log: TextIO = (self.out / f"{name}.log").open("w")
        self.processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )

    def say(self, name: str, command: str) -> None:
        """Tell a worker to do something."""
        stream = self.processes[name].stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.write(command + "\n")
            stream.flush()

    def hear(self, name: str) -> None:
        """Take results until the worker is done, or gone."""
        stream = self.processes[name].stdout
        assert stream is not None
        for line in stream:
            if line.startswith("DONE"):
                return
            if line.startswith("RESULT "):
                self.take(json.loads(line.removeprefix("RESULT ")))
        self.take({"network": name, "what": "the process is gone", "left_s": self.end - time.monotonic()})

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

    def each(self, command: str) -> None:
        """One worker after the other."""
        for name in self.processes:
            self.say(name, command)
            self.hear(name)

    def together(self, command: str) -> None:
        """All workers at once."""
        for name in self.processes:
            self.say(name, command)
        for name in self.processes:
            self.hear(name)

    @contextlib.contextmanager
    def beside(self, command: str) -> Iterator[None]:
        """Run a command while the networks compile, which is not measured; its end is printed."""
        if not command:
            yield
            return
        file = self.out / "beside.log"
        with file.open("w") as log:
            process = subprocess.Popen(shlex.split(command), stdout=log, stderr=log, start_new_session=True)
            yield
            try:
                process.wait(max(1.0, min(45.0, self.end - time.monotonic() - 40)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        print(f"beside, status {process.poll()}:\n{file.read_text()[-1500:]}", flush=True)

    def stop(self) -> None:
        """End the workers, and the compilers that they started."""
        for process in self.processes.values():
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
    parser.add_argument("--limit", type=float, default=170.0, help="seconds, after which all ends")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--beside", default="", help="a command that is run while the networks compile")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy size")
    parser.add_argument("--no-resnet", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work_on(given.worker, toy=given.toy, out=given.out)
        return
    driver = Driver(given.out, given.limit, toy=given.toy)
    try:
        for name in given.networks.split(","):
            driver.start(name)
        for name in driver.processes:
            driver.hear(name)
        driver.each("plain")
        with driver.beside(given.beside):
            driver.together("compile")
        driver.each("compiled")
        driver.each("eager")
        if not given.no_resnet and time.monotonic() < driver.end:
            driver.stop()
            driver.processes.clear()
            driver.start("resnet")
            driver.hear("resnet")
            driver.each("rounds")
    finally:
        driver.stop()
    for result in driver.results:
        if result["what"] == "profile":
            print(f"\n{result['network']}: {result['kernels_a_step']:.0f} kernels, {result['ms_a_step']:.2f} ms a step")
            for kernel, count, ms in result["top"]:
                print(f"{ms:9.3f} ms {count:7} {kernel}")
    print("\n" + table(driver.results))


BEGAN = time.monotonic()
if __name__ == "__main__":
    main()
