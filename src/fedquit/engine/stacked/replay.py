# SPDX-License-Identifier: Apache-2.0
"""Steps of small networks on a CPU, written down once and replayed.

A third of the time of such a step goes into finding out what to do: Python, `vmap`, autograd. Once a step of one shape
has been taken often enough, its operations are written down as a list and from then on carried out as they stand: the
same operations on the same numbers, bit for bit, and no compiler is needed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fedquit.core import Params, Sent

log = logging.getLogger(__name__)
_aten = torch.ops.aten
_FOR_AUTOGRAD = _aten.detach.default, _aten.alias.default
_VIEWS = _aten.view.default, _aten.slice.Tensor, _aten.expand.default
WORTH_IT = 100  # steps: writing one down takes a quarter of a second, which so many replays save
LARGEST = 1 << 21  # numbers in all rows; beyond that a step is long, and what to do is found out meanwhile

Gradient = Sequence[Tensor | None]
Step = Callable[..., tuple[Tensor, Gradient]]
Written = Callable[..., Sequence[Tensor]]


@dataclass
class Steps:
    """The steps of one shape: how many were taken, and what was written down."""

    taken: int = 0
    written: Written | None = None
    given_up: bool = False


@dataclass
class Replays:
    """The steps of one kind of work, by their shapes."""

    by_shape: dict[tuple[int, ...], Steps] = field(default_factory=dict)

    def take(
        self, step: Step, shared: Sent, share: Tensor, own: Params, each: Sent, batch: Sequence[Tensor]
    ) -> tuple[Tensor, Gradient]:
        """One step, `step(shared, share, own, {}, each, *batch)`, or the replay of it."""
        known = self.by_shape.setdefault(tuple(share.shape), Steps())
        known.taken += 1
        inputs = [share, *batch, *own.values(), *_leaves(shared), *_leaves(each)]
        if known.written is None and known.taken > WORTH_IT and not known.given_up:
            self._write(known, step, inputs, (shared, own, each), len(batch))
        if known.written is None:
            return step(shared, share, own, {}, each, *batch)
        with torch.no_grad():
            loss, *gradient = known.written(*inputs)
        return loss, gradient

    def _write(
        self, known: Steps, step: Step, inputs: Sequence[Tensor], like: tuple[Sent, Params, Sent], batch: int
    ) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

        def flat(share: Tensor, *rest: Tensor) -> list[Tensor | None]:
            others = iter(rest[batch:])
            own = {n: next(others).detach().requires_grad_() for n in like[1]}
            shared, each = ({m: {n: next(others) for n in part} for m, part in like[i].items()} for i in (0, 2))
            loss, gradient = step(shared, share, own, {}, each, *rest[:batch])
            return [loss.detach(), *gradient]

        try:
            known.written = _tidy(make_fx(flat)(*(t.detach() for t in inputs)), inputs)
        except Exception as error:  # whatever a network does that cannot be written down, it goes on as before
            log.debug("a step is not replayed: %s", error)
            known.given_up = True


def _leaves(sent: Mapping[str, Params]) -> list[Tensor]:
    return [p for part in sent.values() for p in part.values()]


def _tidy(written: GraphModule, inputs: Sequence[Tensor]) -> Written:
    """Without what changes nothing, and called the shortest way; where that is not the same, as it was written."""
    shorter = copy.deepcopy(written)
    for node in list(shorter.graph.nodes):
        if _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            shorter.graph.erase_node(node)
    shorter.graph.eliminate_dead_code()
    for node in shorter.graph.nodes:
        if isinstance(node.target, OpOverload):
            node.target = _shortest(node.target)
    shorter.recompile()
    with torch.no_grad():
        try:
            same = all(_same(a, b) for a, b in zip(shorter(*inputs), written(*inputs), strict=True))
        except Exception as error:
            log.debug("a step is replayed as it was written: %s", error)
            same = False
    return shorter.forward if same else written.forward


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _changes_nothing(node: Node) -> bool:
    if node.target in _FOR_AUTOGRAD:
        return True
    return node.target in _VIEWS and _shape(node) == _shape(node.args[0])


def _shape(node: Any) -> object:  # noqa: ANN401
    return node.meta["tensor_meta"].shape


def _shortest(op: OpOverload) -> Callable[..., Any]:
    """What torch offers under the same name: it reads its arguments in half of the time."""
    name = "view" if op is _aten._unsafe_view.default else op.overloadpacket.__name__
    known = getattr(torch, name, None), getattr(Tensor, name, None)
    return next((f for f in known if isinstance(f, BuiltinFunctionType | MethodDescriptorType)), op)
