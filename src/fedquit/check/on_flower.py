# SPDX-License-Identifier: Apache-2.0
"""The same life over Flower's messages, in one process, and in the simulator: the models must be equal."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fedquit.check.federation import RECOVERY_ROUNDS, SAMPLES, SmallFederation, described
from fedquit.check.life import Trace, lead_life
from fedquit.check.report import Findings
from fedquit.core import Params, State
from fedquit.core.method import Method

CLIENTS = (0, 1, 2, 3)  # Flower's clients are numbered as they appear
TOLERANCE = 1e-12  # a client computes the same there; what adds up the replies is the same code


def why_not(method: Method) -> str:
    """Why a method cannot be tried on Flower here; "" where it can."""
    if find_spec("flwr") is None:
        return "the extra `flower` is not installed: pip install 'fedquit[flower]'"
    if method.knows_request:
        return "with these options training must know the request in advance, which nobody does in a real federation"
    return ""


def judge_on_flower(federation: SmallFederation, kind: str, folder: Path, findings: Findings) -> float:
    """Lead a federation over Flower's messages and one in the simulator, and compare their models.

    Args:
        federation: that the method is checked in, with the clients `CLIENTS`.
        kind: of the request.
        folder: for what both store.
        findings: where violations are noted.

    Returns:
        The largest difference of two parameters.
    """
    from fedquit.flower.config import ServerConfig
    from fedquit.flower.in_process import InProcessFederation
    from fedquit.running.recipe import build

    expected = last_state(lead_life(federation, kind, folder / "simulator")).params
    request = federation.request(kind)
    recipe = federation.recipe
    over_flower = InProcessFederation(federation.data, federation.setup(federation.build_method()).model, folder)
    settings = {
        "state": str(folder / "state"),
        "seed": recipe.seed,
        "train": recipe.to_dict()["train"],
        "method": dict(recipe.method),
        "recover_rounds": RECOVERY_ROUNDS,
        "together": True,  # as the simulator serves them
        "check_members": len(request.clients) == 1,  # several that cancel each other would be served one by one
    }
    config = build(ServerConfig, settings, "fedquit")
    advice = "keep to the hooks of `Task` and `Method`, which are all that a message carries"
    try:
        over_flower.serve(config)
        for client in request.clients:
            over_flower.outbox(client).file(positions=range(SAMPLES) if request.samples else ())
        result = over_flower.serve(config)
    except Exception as error:  # a user's method may raise anything
        findings.add("flower", "error", f"Flower ({kind})", f"the federation ends in {described(error)}", advice)
        return float("inf")
    unserved = next((e for e in result.erasures if e.fallback or e.status != "done"), None)
    if unserved:
        seen = f"the method did not serve the request of client {unserved.client} ({unserved.reason.rstrip('.')})"
        findings.add("flower", "unserved", f"Flower ({kind})", seen, advice)
        return float("inf")
    deviation = _difference(expected, result.params)
    if not deviation <= TOLERANCE:
        seen = f"the model lies {deviation:.1e} away from the simulator's, where {TOLERANCE:g} is allowed"
        findings.add("flower", "differs", f"Flower ({kind})", seen, advice)
    return deviation


def last_state(life: Trace) -> State:
    """The state with which a life ended."""
    *_, last = life.states.values()
    return last


def _difference(expected: Params, got: Params) -> float:
    if list(got) != list(expected):
        return float("inf")
    return max(float((p - got[name]).abs().max()) for name, p in expected.items() if p.numel())
