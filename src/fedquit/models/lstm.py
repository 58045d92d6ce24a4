# SPDX-License-Identifier: Apache-2.0
"""A character-level LSTM: at every position of a text it predicts the next character."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedquit.errors import InputError


def char_lstm(input_shape: tuple[int, ...], classes: int, *, embedding: int = 128, hidden: int = 256) -> nn.Module:
    """An embedding, one LSTM layer and a linear: windows (T,) of tokens to logits (T, C).

    Args:
        input_shape: (T,), the length of a window.
        classes: the number of different tokens, C.
        embedding: size of a token's embedding.
        hidden: units of the LSTM layer.
    """
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise InputError(f"char_lstm needs windows of tokens, of shape (T,), not {tuple(input_shape)}: use cnn or mlp.")
    if embedding < 1 or hidden < 1:
        raise InputError(f"char_lstm has embedding={embedding} and hidden={hidden}: both must be 1 or more.")
    return CharLstm(classes, embedding, hidden)


class CharLstm(nn.Module):
    """The network, initialised as Keras initialises its layers by default."""

    def __init__(self, classes: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = Lstm(embedding, hidden)
        self.head = nn.Linear(hidden, classes)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        nn.init.xavier_uniform_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, C) of windows (B, T)."""
        logits: Tensor = self.head(self.lstm(self.embedding(x)))
        return logits


class Lstm(nn.Module):
    """One layer, from (B, T, features) to (B, T, hidden), with one bias.

    `torch.nn.LSTM` has two biases, and its fused kernels do not suit the engines: `torch.func.vmap` runs them for one
    client after the other, and cuDNN's cannot be differentiated twice. Here the recurrence is written out. The rows
    of the weights are the input, forget, candidate and output gates.
    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.kernel = nn.Parameter(nn.init.xavier_uniform_(torch.empty(4 * hidden, features)))
        self.recurrent = nn.Parameter(nn.init.orthogonal_(torch.empty(4 * hidden, hidden)))
        bias = torch.zeros(4, hidden)
        bias[1] = 1.0  # of the forget gate: the cell remembers at first
        self.bias = nn.Parameter(bias.flatten())

    def extra_repr(self) -> str:
        return f"features={self.kernel.shape[1]}, hidden={self.hidden}"

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states (B, T, hidden) of inputs (B, T, features)."""
        inputs = functional.linear(x, self.kernel, self.bias)  # (B, T, 4 * hidden): of all steps at once
        h = c = inputs.new_zeros(len(x), self.hidden)  # hidden state and cell state, (B, hidden)
        states = []
        for step in inputs.unbind(1):
            i, f, g, o = (step + functional.linear(h, self.recurrent)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, 1)
