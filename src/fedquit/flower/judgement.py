# SPDX-License-Identifier: Apache-2.0
"""The one place where a client's reply is judged after it was read: whether it counts, and for how much.

`fedquit.flower.wire` has checked before that a reply has the tensors, types and sizes that its question implies. What
is judged here is what a well-formed reply may still do to the model of all.
"""

from __future__ import annotations

from dataclasses import replace

from fedquit.core import Reply


def counted_examples(said: int, enrolled: int | None) -> int:
    """How many examples a client counts for.

    Args:
        said: what the client says.
        enrolled: what the operator agreed with its site; None where the federation is not closed.

    Returns:
        What the client says, but no more than was enrolled: n is its weight in the mean.
    """
    return said if enrolled is None else min(said, enrolled)


def judged_reply(reply: Reply, enrolled: int | None) -> Reply:
    """A reply as it counts.

    Args:
        reply: a well-formed reply.
        enrolled: how many examples the operator agreed with the client's site; None where the federation is not closed.
    """
    return replace(reply, examples=counted_examples(reply.examples, enrolled))
