# SPDX-License-Identifier: Apache-2.0
"""A federation's status as Prometheus metrics: a file for node_exporter's textfile collector, or an HTTP endpoint.

All of them are gauges that are read from disk at the moment of the scrape: nothing is lost when this process ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fedquit.errors import InputError
from fedquit.flower.deploy.environment import LOOPBACK
from fedquit.flower.operations.status import MemberStatus, RequestStatus, Status
from fedquit.utils.files import write_atomic

STATES = ("here", "away", "never seen", "revoked", "forgotten")
READABLE_BY_ALL = 0o644  # node_exporter is another user
Look = Callable[[], Status]


class FederationCollector(Collector):
    """Reads the status anew for every scrape."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def collect(self) -> Iterator[GaugeMetricFamily]:
        status = self._look()
        yield from _process_metrics(status)
        yield from _member_metrics(status.members)
        yield from _request_metrics(status)
        yield from _disk_metrics(status)


def _gauge(name: str, text: str, value: float | bool | None) -> Iterator[GaugeMetricFamily]:
    """One number; nothing where it is not known."""
    if value is not None:
        yield GaugeMetricFamily(f"fedquit_{name}", text, value=float(value))


def _labelled(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"fedquit_{name}", text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _process_metrics(status: Status) -> Iterator[GaugeMetricFamily]:
    yield from _gauge("serving", "Whether the server runs, which starts its app when it is needed.", status.serving)
    yield from _gauge("run_in_progress", "Whether a run of the server app is in progress.", status.running)
    yield from _gauge("training_paused", "Whether training pauses because too few may take part.", bool(status.paused))
    yield from _gauge("model_withdrawn", "Whether the model was dropped because too few stay.", status.withdrawn)
    yield from _gauge("next_request_timestamp_seconds", "When the next waiting request can be started.", status.next)
    yield from _gauge("front_listening", "Whether something listens on the front's port.", status.front)
    yield from _gauge("superlink_listening", "Whether something listens on the SuperLink's port.", status.superlink)
    yield from _gauge("rounds_trained", "Rounds of ordinary training that are done.", status.trained)
    yield from _gauge("rounds_planned", "Rounds of ordinary training in all.", status.rounds)
    yield from _gauge("last_progress_timestamp_seconds", "When the last round was stored.", status.progress)
    yield from _gauge("members_needed", "Members that a round needs.", status.needed)
    yield from _gauge("members_here", "Members that were seen in the last two minutes.", status.here)
    yield from _gauge("damaged_files", "Files that could not be read.", len(status.damaged))


def _member_metrics(members: tuple[MemberStatus, ...]) -> Iterator[GaugeMetricFamily]:
    counted = Counter(member.state for member in members)
    rows = [((state.replace(" ", "_"),), float(counted[state])) for state in STATES]
    yield _labelled("members", "Members by state.", ("state",), rows)
    seen = [((m.name,), m.last_seen) for m in members if m.last_seen is not None]
    yield _labelled("member_last_seen_timestamp_seconds", "When a member was last seen.", ("member",), seen)
    days = [((m.name,), 86_400.0 * m.certificate_days) for m in members if m.certificate_days is not None]
    text = "For how long a member's newest certificate is valid; negative once it has expired."
    yield _labelled("member_certificate_seconds", text, ("member",), days)
    versions = [((m.name, m.fedquit, m.flower), 1.0) for m in members if m.fedquit]
    yield _labelled("member_info", "The versions that a member runs.", ("member", "fedquit", "flower"), versions)


def _request_metrics(status: Status) -> Iterator[GaugeMetricFamily]:
    counted = Counter(request.status for request in status.requests)
    rows = [((name,), float(count)) for name, count in sorted(counted.items())]
    yield _labelled("requests", "Erasure requests by status.", ("status",), rows)
    waiting = status.open_requests
    ages = [_age(request, status.time) for request in waiting]
    yield from _gauge("requests_open", "Erasure requests that are not served yet.", len(waiting))
    yield from _gauge("oldest_open_request_seconds", "Age of the oldest of them.", max(ages, default=0.0))
    deadlines = [((r.id,), r.deadline) for r in waiting if r.deadline is not None]
    text = "When the fallback is used for a request that is being served."
    yield _labelled("request_deadline_timestamp_seconds", text, ("request",), deadlines)
    refused = sum(status.refusals.values())
    yield from _gauge("front_refusals_last_day", "What the front refused in the last day.", refused)


def _age(request: RequestStatus, now: float) -> float:
    try:
        return max(0.0, now - datetime.fromisoformat(request.received).timestamp())
    except ValueError:
        return 0.0


def _disk_metrics(status: Status) -> Iterator[GaugeMetricFamily]:
    free = [((disk.path,), float(disk.free)) for disk in status.disks]
    yield _labelled("disk_free_bytes", "Free space on the file systems of the federation.", ("path",), free)
    total = [((disk.path,), float(disk.total)) for disk in status.disks]
    yield _labelled("disk_size_bytes", "Size of these file systems.", ("path",), total)


def registry_of(look: Look) -> CollectorRegistry:
    """A registry of this federation's metrics alone."""
    registry = CollectorRegistry()
    registry.register(FederationCollector(look))
    return registry


def exposition(status: Status) -> bytes:
    """The metrics in Prometheus's text format."""
    return generate_latest(registry_of(lambda: status))


def write_metrics(status: Status, path: Path) -> None:
    """Write the metrics to a file, whole or not at all; node_exporter reads files that end with `.prom`."""
    if path.suffix != ".prom":
        raise InputError(f"{path}: node_exporter reads files that end with .prom; give such a name.")
    write_atomic(path, exposition(status))
    path.chmod(READABLE_BY_ALL)


def serve_metrics(look: Look, port: int) -> tuple[int, Callable[[], None]]:
    """Serve the metrics over HTTP on loopback, in threads.

    Args:
        look: reads the status; called for every scrape.
        port: 0 for any free one.

    Returns:
        The port, and a function that ends it.
    """
    try:
        server, thread = start_http_server(port, LOOPBACK, registry_of(look))
    except OSError as error:
        raise InputError(f"cannot listen on {LOOPBACK}:{port} ({error.strerror}): give another port.") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
