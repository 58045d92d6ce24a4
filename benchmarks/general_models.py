# SPDX-License-Identifier: Apache-2.0
r"""How fast a GPU trains networks that have no kernels of their own: a GPT, a BERT and MiT-B0, ten clients each.

    python -u benchmarks/general_models.py --out FOLDER              # on a GPU, at most seven minutes
    python -u benchmarks/general_models.py --toy --out FOLDER        # on a CPU, at toy size

Each network has a process of its own, and all wait for orders:

1. Plain loops in float32 and under autocast, one network after the other. Nothing else runs: they wait for the host.
2. Compiled steps (`engine.compile = "always"`): all networks are compiled at once, on the same cores. One that is done
   is timed and profiled at once, and timed again when no other is being compiled ("alone").
3. The stacked engine without a compiler, as it is and with row products and Adam's kernel.

With one network, as in `--networks mit --limit 300`, compiling comes first and has all cores and all but a minute of
the limit; the plain loops and the rest have what is left of it. Ctrl-C (SIGINT) ends all, with the table of what there
is.

Nothing waits for a network that fails or takes longer than its limit. FOLDER/general_models.json is written after every
measurement and FOLDER/NETWORK.log as the process says it, so that a run that is cut off leaves what it had;
FOLDER/NETWORK_code.py is what the compiler wrote. `--networks resnet` times ResNet-18, which has kernels.

The tests that need a GPU are run alone; every failure is named at once, with its gap:

    python -u -m pytest -n 0 -v --tb=short tests/engine/test_on_a_gpu.py tests/engine/test_any_model.py \
        tests/models/test_huggingface.py -k "gpu or cuda or bfloat16_is_near" 2>&1 | tee FOLDER/tests.log
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import torch

from fedquit.bench.measure import machine
from fedquit.bench.settings import Setting, Timed, cifar, engine, plain, tokens, transformer
from fedquit.engine import Precision, StackedEngine
from fedquit.engine.stacked.capture import CapturedSteps

NETWORKS = ("gpt", "bert", "mit")
LIMIT = 420.0  # seconds for all
RESERVE = 60.0  # of them for what comes after compiling
ORDER_LIMITS = {"start": 90.0, "plain": 75.0, "compiled": 40.0, "stacked": 45.0, "products": 45.0, "rounds": 60.0}
PLAIN_STEPS, STACKED_STEPS = 8, 48  # of each client in a round: whole rounds have 125 (texts) and 157 (images)
PROFILED = 25  # kernels that are printed


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
    """One network in a process of its own, which does what it is ordered to."""

    def __init__(self, name: str, *, toy: bool, out: Path) -> None:
        self.name, self.toy, self.out = name, toy, out
        self.device = torch.device("cpu" if toy else "cuda")
        self.precision: Precision = "float32" if toy else "bf16"
        self.steps = (1, 2) if toy else (PLAIN_STEPS, STACKED_STEPS)
        self.few = setting_of(name, self.device, self.steps[0], toy=toy)
        self.many = setting_of(name, self.device, self.steps[1], toy=toy)
        self.timed: Timed | None = None  # compiled
        clients = len(self.many.data.clients)
        numbers = sum(p.numel() for p in self.many.start.values())
        tell(self.name, "setting", title=self.many.title, clients=clients, parameters=numbers)

    def plain(self) -> None:
        """The plain loops."""
        for way, bf16 in (("plain loop, float32", False), ("plain loop, bf16", True)):
            self.measure(way, plain(self.few, 1, bf16=bf16), steps=self.steps[0])

    def stacked(self) -> None:
        """The stacked engine with nothing that was written for networks without kernels."""
        self.timed = None
        release()
        timed = engine(self.many, "stacked", 1, self.precision, "never")
        self.measure("stacked", timed, steps=self.steps[1])
        self.profile("stacked", timed)

    def products(self) -> None:
        """With row products and Adam's kernel."""
        self.timed = None
        release()
        with without_compiler():
            timed = engine(self.many, "stacked", 1, self.precision, "always")
            self.measure("stacked, row products", timed, steps=self.steps[1])
            self.profile("stacked, row products", timed)

    def compile(self) -> None:
        """The first compiled round, the next ones beside others' compiling, and what steps spend their time on."""
        timed = engine(self.many, "stacked", 1, self.precision, "always")
        with ways_chosen() as ways:
            (seconds,) = timed.rounds(1)
        tell(self.name, "first compiled round", seconds=seconds, way=ways[-1] if ways else "no GPU")
        self.timed = timed
        self.measure("compiled, beside others", timed, steps=self.steps[1], warm=0)
        self.profile("compiled", timed)
        if not self.toy:
            self.keep_code()

    def compiled(self) -> None:
        """The compiled rounds once more, with nothing beside them."""
        if self.timed is not None:
            self.measure("compiled", self.timed, steps=self.steps[1], warm=1, repeats=5)

    def measure(self, way: str, timed: Timed, steps: int, warm: int = 1, repeats: int = 3) -> None:
        """Milliseconds a step of all clients, from whole rounds; the first rounds are told apart."""
        first = timed.rounds(warm)
        step = [1000 * seconds / steps for seconds in timed.rounds(repeats)]
        accuracy = timed.setting.accuracy(timed.params)
        peak = torch.cuda.max_memory_allocated() / 2**30 if not self.toy else 0.0
        tell(self.name, way, ms_a_step=step, first_s=first, accuracy=accuracy, rounds=timed.done, peak_gib=peak)

    def profile(self, way: str, timed: Timed) -> None:
        """The kernels that take the most time of a round; a CPU has none."""
        if self.toy:
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            timed.rounds(1)
        kernels = [e for e in found.key_averages() if e.self_device_time_total > 0]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in kernels)
        ms = 1000 * self.steps[1]
        rows = [(e.key[:140], e.count, e.self_device_time_total / ms) for e in kernels]
        name = "_".join([self.name, *way.replace(",", "").split(), "kernels"])
        (self.out / f"{name}.json").write_text(json.dumps(rows, indent=1))
        count = sum(e.count for e in kernels) / self.steps[1]
        tell(self.name, f"profile: {way}", kernels_a_step=count, ms_a_step=total / ms, top=rows[:PROFILED])

    def keep_code(self) -> None:
        """The longest program that the compiler wrote: it tells what each kernel computes."""
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
        programs = sorted(Path(folder).rglob("*.py"), key=lambda file: file.stat().st_size) if folder else []
        if programs:
            (self.out / f"{self.name}_code.py").write_text(programs[-1].read_text())


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
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tell(network: str, what: str, **figures: object) -> None:
    """Say a result to the driver."""
    print("RESULT " + json.dumps({"network": network, "what": what, **figures}), flush=True)


def work_on(name: str, *, toy: bool, out: Path) -> None:
    """Do what the driver orders, a word a line, until it says no more."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    worker: Worker | Resnet = Resnet(toy=toy) if name == "resnet" else Worker(name, toy=toy, out=out)
    print("READY start", flush=True)
    for order in map(str.strip, sys.stdin):
        way: Callable[[], None] = getattr(worker, order)
        logging.info("ordered: %s", order)
        try:
            way()
        except Exception as error:  # a way that fails must not take the others with it
            traceback.print_exc()
            tell(name, f"failed: {order}", error=f"{type(error).__name__}: {str(error)[:600]}")
            if "CUDA" in str(error):  # nothing works in this process any more
                sys.exit(1)
        release()
        print(f"READY {order}", flush=True)


class Process:
    """A worker as the driver sees it; one that has ended is started again by its next order."""

    def __init__(self, name: str, said: queue.Queue[tuple[str, str]], out: Path, *, compilers: int, toy: bool) -> None:
        self.name, self.said, self.out, self.compilers, self.toy = name, said, out, compilers, toy
        self.doing = ""
        self.until = 0.0
        self.process: subprocess.Popen[str] | None = None
        self.log: IO[str] = (out / f"{name}.log").open("w")

    def start(self) -> None:
        """Begin a process."""
        cache = Path(tempfile.gettempdir()) / "general-models" / self.name
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_COMPILE_THREADS": str(self.compilers),
        }
        command = [sys.executable, "-u", __file__, "--worker", self.name, "--out", str(self.out), *["--toy"] * self.toy]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process = subprocess.Popen(command, **pipes, start_new_session=True, env=environment)
        threading.Thread(target=self._listen, args=[self.process], daemon=True).start()
        self.doing, self.until = "start", time.monotonic() + ORDER_LIMITS["start"]

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said.put((self.name, line))
        if self.process is process:
            self.said.put((self.name, f"ENDED {process.wait()}"))

    def order(self, what: str, limit: float) -> None:
        """Let it do something, for at most so many seconds."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.doing, self.until = what, time.monotonic() + limit
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """End the process, and the compilers that it started."""
        process, self.process, self.doing = self.process, None, ""
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Driver:
    """Orders the work, and writes what comes of it."""

    def __init__(self, names: list[str], out: Path, limit: float, *, toy: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.deadline = BEGAN + limit
        self.results: list[dict[str, Any]] = []
        self.said: queue.Queue[tuple[str, str]] = queue.Queue()
        compilers = max(1, (os.cpu_count() or 1) // max(1, len(names) - 1))  # processes: all cores for one network
        self.processes = {name: Process(name, self.said, out, compilers=compilers, toy=toy) for name in names}
        self.where: dict[str, Any] = {}  # is measured

    def run(self) -> None:
        """Measure all networks."""
        try:
            for process in self.processes.values():
                process.start()
            self.where = machine(torch.device("cpu")) | {"torch": torch.__version__}
            if torch.cuda.is_available():
                self.where["gpu"] = torch.cuda.get_device_name()
            self.wait()
            self._work()
        except KeyboardInterrupt:
            self.take({"network": "all", "what": "interrupted"})
            raise SystemExit(128 + signal.SIGINT) from None
        finally:
            for process in self.processes.values():
                process.end()
            print(table(self.results), flush=True)

    def _work(self) -> None:
        general = [name for name in self.processes if name != "resnet"]
        for orders in stages(len(general)):
            for order in orders:
                for name in general:
                    if order == "compile":
                        self.begin(name, order, self.deadline - RESERVE - time.monotonic())
                    else:
                        self.one(name, order)
            self.wait()
            print(table(self.results), flush=True)
        if "resnet" in self.processes:
            self.one("resnet", "rounds")

    def one(self, name: str, order: str) -> None:
        """Let one network do something, and wait for it."""
        self.begin(name, order, ORDER_LIMITS[order])
        self.wait()

    def begin(self, name: str, order: str, limit: float) -> None:
        """Let a network do something, unless the time is up; a process that has ended begins anew."""
        left = self.deadline - time.monotonic()
        if left < 1 or limit < 1:
            self.take({"network": name, "what": f"no time left: {order}"})
            return
        process = self.processes[name]
        if process.process is None:
            if order == "compiled":  # that was in the process
                return
            process.start()
            self.wait(name)
        if process.process is not None:
            process.order(order, min(limit, left))

    def wait(self, name: str = "") -> None:
        """Take what networks say until all, or the one of that name, have done what they were ordered."""
        mine = [self.processes[name]] if name else list(self.processes.values())
        while any(process.doing for process in mine):
            for process in self.processes.values():
                if process.doing and time.monotonic() > process.until:
                    self.take({"network": process.name, "what": f"too long: {process.doing}"})
                    process.end()
            try:
                who, line = self.said.get(timeout=0.5)
            except queue.Empty:
                continue
            self._hear(self.processes[who], line)

    def _hear(self, process: Process, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        if word == "RESULT":
            self.take(json.loads(rest))
        elif word == "READY" and process.doing == rest:
            process.doing = ""
        elif word == "ENDED" and process.process is not None:
            self.take({"network": process.name, "what": f"ended: {process.doing}", "status": rest})
            process.end()

    def take(self, result: dict[str, Any]) -> None:
        """Write a result."""
        result["at_s"] = round(time.monotonic() - BEGAN, 1)
        self.results.append(result)
        text = json.dumps({"machine": self.where, "results": self.results}, indent=1)
        (self.out / "general_models.json").write_text(text)
        print({k: v for k, v in result.items() if k != "top"}, flush=True)
        if result["what"].startswith("profile"):
            time_in = f"{result['kernels_a_step']:.0f} kernels, {result['ms_a_step']:.2f} ms a step"
            print(f"{result['network']}, {result['what']}: {time_in}")
            for kernel, count, ms in result["top"]:
                print(f"{ms:9.3f} ms {count:7} {kernel}", flush=True)


def stages(networks: int) -> tuple[tuple[str, ...], ...]:
    """What is ordered of so many networks, in this order; a table is printed after each stage."""
    if networks == 1:  # nothing of another disturbs it, and the compiler is what needs the time
        return (("compile",), ("compiled",), ("plain",), ("stacked",), ("products",))
    return (("plain",), ("compile",), ("compiled",), ("stacked",), ("products",))


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
    parser.add_argument("--networks", default=",".join(NETWORKS), help="and resnet")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy size")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work_on(given.worker, toy=given.toy, out=given.out)
    else:
        Driver(given.networks.split(","), given.out, given.limit, toy=given.toy).run()


BEGAN = time.monotonic()
if __name__ == "__main__":
    main()
