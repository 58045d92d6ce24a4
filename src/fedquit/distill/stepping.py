# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on one module: the optimizer by name, class or function, and float32 weights behind half precision.

Adam's second moment underflows in float16, and a step of float32's size is lost in bfloat16's rounding. So a trainable
parameter of half precision has a float32 copy, its master: gradients are taken in the model's own precision, the
optimizer works on the masters, and the model gets them rounded. With float16 the loss is scaled up before its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fedquit.errors import InputError, NonFiniteError
from fedquit.utils.names import lookup

HALF = (torch.float16, torch.bfloat16)
SCALE = 2.0**12  # of a loss in float16, at first
TRIES = 10  # steps in a row that may overflow
NewOptimizer = Callable[..., torch.optim.Optimizer]
OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The paper's optimizer for convolutional networks."""
    return torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.999), eps=1e-7)


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The paper's optimizer for transformers, with the weight decay that Keras has by default."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.999), eps=1e-7, weight_decay=0.004)


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Plain steps without momentum: the optimizer that the paper's bound on the drift is about."""
    return torch.optim.SGD(parameters, lr=lr)


OPTIMIZERS: dict[str, NewOptimizer] = {"adam": adam, "adamw": adamw, "sgd": sgd}


def new_optimizer(optimizer: str | NewOptimizer, lr: float) -> OptimizerOf:
    """A function that makes the optimizer of some parameters.

    Args:
        optimizer: `adam`, `adamw` or `sgd`; a class of `torch.optim`, called with `lr`; or a function
            (parameters, lr) -> optimizer.
        lr: the learning rate.

    Raises:
        UnknownNameError: for a name that does not exist.
    """
    make = lookup(OPTIMIZERS, optimizer, "optimizer") if isinstance(optimizer, str) else optimizer
    if isinstance(make, torch.optim.Optimizer):
        raise InputError(
            "optimizer is made already, for the parameters of another model: "
            f"give its class, such as torch.optim.{type(make).__name__}, or a function (parameters, lr) -> optimizer."
        )
    if not callable(make):
        raise InputError(f"optimizer is a {type(make).__name__}: give a name, a class or a function (parameters, lr).")

    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            optimizer = make(parameters, lr=lr) if isinstance(make, type) else make(parameters, lr)
        except TypeError as error:
            raise InputError(
                f"the optimizer cannot be made: {error}; give a class of torch.optim or a function (parameters, lr)."
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"optimizer returns a {type(optimizer).__name__}: let it return a torch.optim.Optimizer.")
        return optimizer

    return made


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that move, by name.

    Raises:
        InputError: if there is none.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise InputError("the model has no parameter that requires a gradient, so nothing can change: thaw some.")
    return trainable


def check_gradient(loss: Tensor) -> None:
    """Raise an InputError where no gradient leads from a loss to the parameters."""
    if not loss.requires_grad:
        raise InputError(
            "the model's logits have no gradient: leave `detach`, `torch.no_grad` and the like out of its forward."
        )


class Steps:
    """Takes optimizer steps on the trainable parameters of a module.

    Args:
        model: whose parameters move; those that require no gradient stay.
        make: makes the optimizer.

    Raises:
        InputError: if no parameter requires a gradient.
    """

    def __init__(self, model: nn.Module, make: OptimizerOf) -> None:
        trainable = list(trainable_parameters(model).values())
        self.halves = [(p, nn.Parameter(p.detach().float())) for p in trainable if p.dtype in HALF]
        self.others = [p for p in trainable if p.dtype not in HALF]
        masters = {id(p): master for p, master in self.halves}
        self.optimizer = make([masters.get(id(p), p) for p in trainable])
        self.scale = SCALE if any(p.dtype == torch.float16 for p in trainable) else 1.0
        self.overflows = 0
        self.taken = 0  # those that overflowed, too

    def take(self, loss: Tensor) -> None:
        """Take one step down the gradient of `loss`; one whose gradient overflows float16 is left out.

        Raises:
            NonFiniteError: if ten steps in a row overflow, or the rate itself does.
            InputError: if the loss has no gradient.
        """
        check_gradient(loss)
        self.taken += 1
        self.optimizer.zero_grad()
        if not self.halves:
            loss.backward()
            self._step()
            return
        (loss * self.scale).backward()
        for parameter, master in self.halves:
            master.grad = None if parameter.grad is None else parameter.grad.float() / self.scale
            parameter.grad = None
        for parameter in self.others:
            if parameter.grad is not None:
                parameter.grad /= self.scale
        if self.scale != 1 and not self._finite():
            self.scale, self.overflows = self.scale / 2, self.overflows + 1
            if self.overflows == TRIES:
                raise NonFiniteError("ten gradients in a row overflow float16: lower the rate, or use bfloat16.")
            return
        self.overflows = 0
        self._step()
        with torch.no_grad():
            for parameter, master in self.halves:
                parameter.copy_(master)

    def _step(self) -> None:
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if "without overflow" in str(error):
                raise NonFiniteError("the rate is too large for the weights' type: lower it.") from error
            raise

    def _finite(self) -> bool:
        gradients = [parameter.grad for parameter in (*(master for _, master in self.halves), *self.others)]
        return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
