# SPDX-License-Identifier: Apache-2.0
"""Sends messages over a Flower grid and matches each reply with the message that it answers.

Flower does not check that the sender which a reply names is the node that sent it, and a reply may come twice, late, or
in a form that cannot be read. `Transport.exchange` returns exactly one result for every message: its reply, or a
sentence that says why there is none. What a message contains is defined in `fedquit.flower.wire`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedquit.flower import wire

FIRST_POLL = 0.05  # seconds between the first two polls for replies
LONGEST_POLL = 3.0  # seconds between two polls at most
PATIENCE = 30.0  # seconds after which a wait is reported again, and a silent node is asked again
MAX_REASON = 500  # characters of a reason that comes from outside

Say = Callable[[str], None]


@dataclass(frozen=True)
class Clock:
    """The time and a way to wait, which tests replace to run faster."""

    now: Callable[[], float] = time.time  # Unix time in seconds: a deadline outlives the process
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class OutgoingMessage:
    """A message to one node. Its reply must carry the same nonce, which only the node that was asked can know."""

    node: int
    message_type: str
    content: RecordDict
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        wire.attach_nonce(self.content, self.nonce)


@dataclass(frozen=True)
class Transport:
    """Sends messages to nodes and collects their replies."""

    grid: Grid
    say: Say  # tells the operator
    clock: Clock = Clock()

    def exchange(
        self, messages: Sequence[OutgoingMessage], timeout: float
    ) -> Iterator[tuple[OutgoingMessage, Message | str]]:
        """Send messages and yield their replies as they come in.

        Args:
            messages: what to send, each to its node.
            timeout: seconds to wait for replies.

        Returns:
            Every message once, with its reply or with a sentence that says why there is none.
        """
        if not messages:
            return
        message_ids = self._push(messages, timeout)
        waiting: dict[str, OutgoingMessage] = {}
        unsent: list[OutgoingMessage] = []
        for message_id, message in zip(message_ids, messages, strict=True):
            if message_id:
                waiting[message_id] = message
            else:
                unsent.append(message)
        for message in unsent:
            yield message, "the message could not be sent"
        yield from self._replies(waiting, timeout)
        for message in waiting.values():
            yield message, f"no answer within {timeout:.0f} s"

    def _push(self, messages: Sequence[OutgoingMessage], timeout: float) -> list[str]:
        """Send the messages; their ids in order, "" for one that could not be sent."""
        outgoing = [Message(m.content, m.node, m.message_type, ttl=timeout + PATIENCE) for m in messages]
        sent_ids = list(self.grid.push_messages(outgoing))
        if len(sent_ids) == len(outgoing):
            return sent_ids
        own_ids = [m.metadata.message_id for m in outgoing]  # some grids leave out what they could not send
        return [message_id if message_id in sent_ids else "" for message_id in own_ids]

    def _replies(
        self, waiting: dict[str, OutgoingMessage], timeout: float
    ) -> Iterator[tuple[OutgoingMessage, Message | str]]:
        """Poll until every message is answered or the time is up; whatever is answered leaves `waiting`."""
        answered: set[str] = set()
        deadline = self.clock.now() + timeout
        pause = FIRST_POLL
        while waiting:
            for message_id in list(waiting):
                for reply in self._pull(message_id):
                    if isinstance(reply, str):
                        yield waiting.pop(message_id), reply
                        continue
                    claimed_id = reply.metadata.reply_to_message_id  # set by the sender, who may claim any
                    if claimed_id != message_id or message_id not in waiting:
                        self._report_ignored(reply, repeated=claimed_id in answered)
                        continue
                    message = waiting.pop(message_id)
                    answered.add(message_id)
                    yield message, _verified(message, reply)
            if self.clock.now() >= deadline:
                return
            if waiting:
                self.clock.sleep(pause)
                pause = min(LONGEST_POLL, 1.5 * pause)

    def _pull(self, message_id: str) -> list[Message | str]:
        """The replies to one message. Flower hands a reply out once, so an unreadable one must not cost the others."""
        try:
            return list(self.grid.pull_messages([message_id]))
        except Exception as error:  # the bytes come from outside and can fail to parse in any way
            self.grid.get_nodes()  # raises if the connection to the SuperLink failed, and not the reply
            return [f"the reply cannot be read ({type(error).__name__}: {error})"[:MAX_REASON]]

    def _report_ignored(self, reply: Message, *, repeated: bool) -> None:
        kind = "a second reply to one question" if repeated else "a reply to no question of this round"
        self.say(f"ignored {kind}, from node {reply.metadata.src_node_id}")


def _verified(message: OutgoingMessage, reply: Message) -> Message | str:
    """The reply, if it comes from the node that was asked; otherwise the reason why it does not count."""
    if reply.has_error():  # from the SuperLink itself, for example because the node has left
        reason = " ".join((reply.error.reason or "no reason given").split())
        return f"error {reply.error.code}: {reason[:MAX_REASON]}"
    source = reply.metadata.src_node_id
    if source and source != message.node:
        return f"the reply is from node {source}, which was not asked"
    try:
        wire.require_nonce(reply.content, message.nonce)
    except wire.InvalidMessage as error:
        return str(error)
    return reply
