# SPDX-License-Identifier: Apache-2.0
"""Carries out a study on a real Ray cluster of several node processes, one of which is killed in the middle of a unit.

python ray_study.py WORK -> prints JSON: what was under way when the node was killed, the nodes left, the records
"""

from __future__ import annotations

import json
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from study_world import carried_out, planned, records

BLOCK = {
    "recipe": "tiny.toml",
    "set": ["train.rounds=30"],
    "targets": [0, 1],
    "methods": ["fedquit", "pga"],
}


def _alive(ray: Any) -> int:
    return sum(1 for node in ray.nodes() if node["Alive"])


def main(work: Path) -> None:
    ray: Any = import_module("ray")
    cluster: Any = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    plan = planned(work, BLOCK)
    out = work / "on-ray"
    begun: list[str] = []

    def kill() -> None:
        trainings = out / "state" / "trainings"
        while len(list(trainings.glob("*/state.safetensors"))) < 2:  # each node is at work on one
            time.sleep(0.02)
        begun.extend(path.parent.name for path in trainings.glob("*/state.safetensors"))
        cluster.remove_node(nodes[0], allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    outcome = carried_out(plan, out, workers="ray")
    killer.join()
    alive = _alive(ray)
    deadline = time.monotonic() + 120
    while alive > 2 and time.monotonic() < deadline:  # a busy cluster notices a death after a while
        time.sleep(0.5)
        alive = _alive(ray)
    carried_out(plan, work / "alone")
    report = {
        "begun": len(begun),
        "nodes": alive,
        "missing": len(outcome.status.missing),
        "failed": dict(outcome.status.failed),
        "same": records(out) == records(work / "alone"),
        "records": len(records(out)),
    }
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(report))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(Path(sys.argv[1]))
