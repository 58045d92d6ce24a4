# SPDX-License-Identifier: Apache-2.0
"""A client's own BatchNorm (`fedquit.core.local_layers`) in a visit: before its task and after it, in every engine."""

from __future__ import annotations

from dataclasses import replace

from fedquit.core import Effort, Measurement, Model, Params, Program, Sent, Task
from fedquit.core.local_layers import LAYERS, BeginAnew, LocalModel, local_names, with_layers
from fedquit.core.params import device_of, placed
from fedquit.core.recalibration import Recalibrate
from fedquit.engine.api import Ask, LocalResult
from fedquit.engine.plan import Address


def first_layers(model: Model, run_seed: int) -> Params:
    """Return the layers with which a client begins that has none: those of the run's first parameters."""
    if not isinstance(model, LocalModel):
        return {}
    return model.first_layers(Address(run_seed, "init").seed_for("server"))


def own_layers(model: Model, ask: Ask, memory: Sent) -> Params:
    """Return the layers that a client begins a visit with; nothing for a network whose layers all travel.

    Args:
        model: The network.
        ask: The question.
        memory: What the client has at home, by name.
    """
    if not local_names(model):
        return {}
    own = memory.get(LAYERS) or first_layers(model, ask.address.seed)
    return placed(own, device_of(ask.sent.get("start", own)))


def at_client(model: Model, ask: Ask, layers: Params) -> Ask:
    """Return the question as the client understands it: every whole model has its own layers.

    Args:
        model: The network.
        ask: The question.
        layers: What `own_layers` returned.
    """
    return replace(ask, sent=with_layers(model, ask.sent, layers)) if layers else ask


def after_visit(task: Task | Program, layers: Params, result: LocalResult, examples: int) -> LocalResult:
    """Return the result with the layers kept at home, and without them in the answer.

    Training moves them, the recalibration measures their statistics, and any other measurement leaves them.

    Args:
        task: What the client did.
        layers: What `own_layers` returned.
        result: What it led to.
        examples: How many examples the client used.
    """
    if not layers:
        return result
    answer = {n: p for n, p in result.answer.items() if n not in layers}
    keep = dict(result.keep)
    if isinstance(task, BeginAnew):
        return replace(result, keep={LAYERS: {}}, efforts=(Effort(examples, 0),))
    if isinstance(task, Recalibrate) and examples:
        keep[LAYERS] = {n: result.answer.get(n, p) for n, p in layers.items()}
    elif not isinstance(task, Measurement):
        # Clones: a view would keep the parameters of all stacked clients in memory.
        keep[LAYERS] = {n: result.params.get(n, p).detach().clone() for n, p in layers.items()}
    return replace(result, answer=answer, keep=keep)
