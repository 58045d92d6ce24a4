# SPDX-License-Identifier: Apache-2.0
"""The same study on a cluster: a unit lost with its node is run again elsewhere, and the records are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedquit.errors import InputError
from fedquit.studies.execution import RayTasks
from test_kill import HERE, environment


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
def test_a_study_survives_the_death_of_a_node_of_the_cluster(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "ray_study.py"), str(tmp_path / "work")]
    patient = {"RAY_raylet_start_wait_time_s": "300", "RAY_gcs_server_request_timeout_seconds": "300"}
    with TemporaryDirectory(prefix="ray-") as own:  # else whoever calls `ray.init()` meanwhile joins this cluster
        found = {**environment(), **patient, "RAY_TMPDIR": own}
        done = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["begun"] >= 2, "both nodes were at work when one was killed"
    assert report["nodes"] == 2, "the head and one node are left"
    assert (report["missing"], report["failed"]) == (0, {})
    assert report["records"] == 7
    assert report["same"]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"fedquit\[ray\]"):
        RayTasks()
