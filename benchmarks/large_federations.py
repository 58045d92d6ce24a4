# SPDX-License-Identifier: Apache-2.0
"""Larger federations: seconds a round and memory, with nodes as processes behind the front, and with many sites.

    python benchmarks/large_federations.py nodes --count 20 --rounds 3   a closed federation on this machine
    python benchmarks/large_federations.py register --count 1000   all keys of a closed federation, at its SuperLink
    python benchmarks/large_federations.py sites --count 1000 --cohort 50 --rounds 5   messages within one process

`nodes` makes a project, enrols all sites by one table, starts `serve` and a node for each, and measures the training.
`sites` runs the server and all clients in one process, with Flower's messages as bytes on both ways, and erases one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PERIOD = 0.2  # seconds between two looks at the server's log
LONGEST = 1800.0  # seconds that a measurement may take
DONE = "training round "


# Many sites in one process


def measure_sites(count: int, cohort: int, rounds: int) -> dict[str, Any]:
    """Train and erase in one process.

    Args:
        count: of sites.
        cohort: of a round.
        rounds: of training.
    """
    import torch

    from fedquit.data import federate, load_dataset
    from fedquit.flower.config import ServerConfig
    from fedquit.flower.in_process import InProcessFederation
    from fedquit.models import load_model
    from fedquit.running.recipe import build

    torch.set_num_threads(1)
    dataset = load_dataset("fashion_mnist_mini")
    data = federate(dataset, partition="iid", clients=count, seed=0)
    model = load_model("mlp", dataset.x.shape[1:], dataset.classes, hidden=128)
    with tempfile.TemporaryDirectory(prefix="fedquit-sites-") as folder:
        federation = InProcessFederation(data, model, Path(folder))
        settings: dict[str, Any] = {
            "state": str(Path(folder) / "state"),
            "train": {"rounds": 0, "clients_per_round": cohort, "batch_size": 8, "lr": 0.1},
            "recover_rounds": 1,
        }
        wall: list[float] = []
        processor: list[float] = []

        def serve(until: int) -> Any:  # noqa: ANN401 - a result of the server
            began, used = time.perf_counter(), time.process_time()
            train = {**settings["train"], "rounds": until}
            result = federation.serve(build(ServerConfig, {**settings, "train": train}, "fedquit"))
            wall.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
            return result

        serve(1)
        serve(rounds + 2)  # `rounds` more than the first time; all else, meeting everybody and asking them, is the same
        federation.outbox(7).file()
        (erasure,) = serve(rounds + 2).erasures
        stored = sum(p.stat().st_size for p in (Path(folder) / "state").rglob("*") if p.is_file())
    return {
        "sites": count,
        "cohort": cohort,
        "parameters": sum(p.numel() for p in model.init(0).values()),
        "seconds a round": round((wall[1] - wall[0]) / rounds, 3),
        "processor seconds a round": round((processor[1] - processor[0]) / rounds, 3),
        "seconds to meet everybody, one round, and to ask for requests": round(wall[0], 1),
        "seconds of a run that erases one client": round(wall[2], 1),
        "erasure": f"{erasure.method}, {erasure.status}",
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "state directory MB": round(stored / 1e6, 1),
    }


# Nodes as processes, through the front


def measure_nodes(count: int, rounds: int) -> dict[str, Any]:
    """Train a closed federation on this machine.

    Args:
        count: of nodes.
        rounds: of training.
    """
    with tempfile.TemporaryDirectory(prefix="fedquit-nodes-") as name:
        folder = Path(name)
        seconds: dict[str, float] = {}
        began = time.perf_counter()
        app, sites = _closed_federation(folder, count)
        seconds["making and enrolling"] = time.perf_counter() - began
        with _processes(folder) as start:
            serve = [*FEDQUIT, "flower", "serve", str(app), "--state", "state", "--project", "project"]
            for setting in (f"train.rounds={rounds}", f"min-nodes={count}", "wait=1200.0"):
                serve += ["--set", f"fedquit.{setting}"]
            began = time.perf_counter()
            roots = [start("serve", [*serve, "--set", f"partitions={count}"])]
            for number, site in enumerate(sites):
                own = [
                    "--home",
                    f"home-{number}",
                    "--set",
                    f"partition-id={number}",
                    "--set",
                    f"num-partitions={count}",
                ]
                roots.append(start(site.name, [str(site / "start.sh"), *own]))
            at, peak = _watched(folder / "state" / "events.jsonl", rounds, roots)
            notes = [str(event.get("text", "")) for event in _events(folder / "state" / "events.jsonl")]
        seconds["until all nodes are there and the first round is over"] = at[0] - began
    each = [later - earlier for earlier, later in itertools.pairwise(at)]
    return {
        "nodes": count,
        "seconds a round": [round(value, 1) for value in each],
        "replies": [note.partition("(")[2].partition(" replies")[0] for note in notes if note.startswith(DONE)],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "peak MB of all processes": round(peak["all"]),
        "peak MB of the server's processes": round(peak["server"]),
        "load average": round(os.getloadavg()[0], 1),
    }


def measure_registration(count: int, one_by_one: int) -> dict[str, Any]:
    """Register the keys of many sites at a SuperLink.

    Args:
        count: of sites.
        one_by_one: of further keys that are registered by a process of `flwr` for each, for comparison.
    """
    from fedquit.flower.closed.project import Admission, Project
    from fedquit.flower.closed.service import Registrar
    from fedquit.flower.closed.site_folder import SiteFolder
    from fedquit.flower.deploy.keys import make_node_key
    from fedquit.flower.deploy.stack import Stack

    with tempfile.TemporaryDirectory(prefix="fedquit-register-") as name:
        folder = Path(name)
        project = Project(_closed_federation(folder, 1)[0].parent / "project")
        admissions = []
        for number in range(1, count):
            SiteFolder(folder / f"site-{number}").join()
            request = (folder / f"site-{number}" / "request.csr").read_bytes()
            admissions.append(Admission(f"site-{number}", request, 100))
        began = time.perf_counter()
        project.enrol_many(admissions)
        enrolled = time.perf_counter() - began
        keys = [make_node_key(folder / "keys", f"key-{number}") for number in range(one_by_one)]
        with Stack(folder / "stack") as stack:
            began = time.perf_counter()
            Registrar(project, folder, stack.control, folder / "memo.json", None, lambda _: None).bring_up_to_date()
            together = time.perf_counter() - began
            assert len(stack.control.nodes()) == count
            began = time.perf_counter()
            for number, key in enumerate(keys):
                stack.control.register(key, f"single-{number}")
            alone = (time.perf_counter() - began) / max(1, one_by_one)
    return {
        "sites": count,
        "seconds to enrol all": round(enrolled, 1),
        "seconds to register all over one connection": round(together, 1),
        "seconds for each by a process of its own": round(alone, 2),
        "load average": round(os.getloadavg()[0], 1),
    }


FEDQUIT = [sys.executable, "-m", "fedquit"]


def _closed_federation(folder: Path, count: int) -> tuple[Path, list[Path]]:
    """A project with a signed app and so many sites, all enrolled by one table; the app, and the sites' folders."""
    from fedquit.flower.closed.bundle import Bundle
    from fedquit.flower.closed.site_folder import SiteFolder
    from fedquit.flower.deploy.demo import app_folder
    from fedquit.flower.deploy.environment import free_ports

    app = Path(shutil.copytree(app_folder(), folder / "app"))
    front, superlink = free_ports(2)
    init = ["init", "project", "--host", "127.0.0.1", "--listen", "127.0.0.1", "--port", str(front)]
    _fedquit(folder, *init, "--superlink-port", str(superlink))
    _fedquit(folder, "sign", "app", "--project", "project")
    sites = [folder / f"site-{number}" for number in range(count)]
    lines = ["name,csr,examples"]
    for site in sites:
        SiteFolder(site).join()
        lines.append(f"{site.name},{site.name}/request.csr,1000")
    (folder / "sites.csv").write_text("\n".join(lines) + "\n")
    _fedquit(folder, "enrol", "--table", "sites.csv", "--project", "project", "--out", "bundles")
    for site in sites:
        SiteFolder(site).install(Bundle.unpack((folder / "bundles" / f"{site.name}.tar").read_bytes()))
    return app, sites


def _fedquit(folder: Path, *words: str) -> None:
    subprocess.run([*FEDQUIT, "flower", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def _processes(folder: Path) -> Iterator[Any]:
    """A function that starts a command in the folder; all that were started end with the `with`."""
    started: list[subprocess.Popen[bytes]] = []
    (folder / "logs").mkdir()
    here = str(Path(sys.executable).parent)  # a site's start.sh looks for `fedquit` there
    environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}

    def start(name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (folder / "logs" / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(started):  # nodes first
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(started):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _watched(
    log: Path, rounds: int, started: Sequence[subprocess.Popen[bytes]]
) -> tuple[list[float], dict[str, float]]:
    """When each round of training was over, and the most memory meanwhile in MB: of all processes, and of `serve`'s."""
    at: list[float] = []
    peak = {"all": 0.0, "server": 0.0}
    deadline = time.perf_counter() + LONGEST
    looked = 0.0
    roots = [process.pid for process in started]
    while len(at) < rounds:
        for process in started:
            if process.poll() is not None:
                logs = (log.parents[1] / "logs").iterdir()
                last = [line for path in logs for line in path.read_text().splitlines()[-1:]]
                raise SystemExit(f"{process.args!r} has ended with {process.returncode}. The logs end with: {last}")
        if time.perf_counter() > deadline:
            raise SystemExit(
                f"{len(at)} of {rounds} rounds after {LONGEST:.0f} s: look at the logs in {log.parents[1]}."
            )
        over = sum(DONE in str(note.get("text", "")) for note in _events(log))
        at += [time.perf_counter()] * (over - len(at))
        if time.perf_counter() - looked > 1:
            looked = time.perf_counter()
            tree = _tree()
            peak["all"] = max(peak["all"], sum(_megabytes(pid) for root in roots for pid in _below(tree, root)))
            peak["server"] = max(peak["server"], sum(_megabytes(pid) for pid in _below(tree, roots[0])))
        time.sleep(PERIOD)
    return at, peak


def _events(log: Path) -> list[dict[str, Any]]:
    try:
        lines = log.read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _tree() -> dict[int, list[int]]:
    """The children of each process of this machine."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def _below(tree: Mapping[int, Sequence[int]], root: int) -> Iterator[int]:
    yield root
    for child in tree.get(root, ()):
        yield from _below(tree, child)


def _megabytes(pid: int) -> float:
    """The memory of a process; what several share is divided among them."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:  # it has ended
        pass
    return 0.0


def main(arguments: Sequence[str]) -> None:
    """Run one of the measurements and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["nodes", "register", "sites"])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--cohort", type=int, default=50, help="of a round, for `sites`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-by-one", type=int, default=20, help="keys for comparison, for `register`")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes end with this one
    if options.what == "register":
        print(json.dumps(measure_registration(options.count, options.one_by_one), indent=1))
    elif options.what == "nodes":
        print(json.dumps(measure_nodes(options.count, options.rounds), indent=1))
    else:
        print(json.dumps(measure_sites(options.count, options.cohort, options.rounds), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
