# SPDX-License-Identifier: Apache-2.0
"""An engine whose clients are Flower nodes: it sends each question as a message and checks every reply.

`GridEngine` has the interface of the simulator's engines, so sessions, methods and cost meters work on either. The
difference is that a client may not answer. A round goes on without it if enough others answer; a client that leaves is
asked again until its deadline. `fedquit.flower.transport` carries the messages, `fedquit.flower.presence` knows which
clients are online.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedquit.core import SERVER, ClientId, Model, Reply
from fedquit.engine import Address, Ask, Examples, run_visit
from fedquit.engine.plan import fixed_uniforms
from fedquit.errors import FedquitError, UnreachableError
from fedquit.flower import wire
from fedquit.flower.client import ClientData
from fedquit.flower.judgement import Judge, RefusedReply
from fedquit.flower.presence import Presence
from fedquit.flower.transport import LONGEST_POLL, PATIENCE, Clock, OutgoingMessage

TRIES = 3  # invalid replies of a client that must answer, before it counts as unreachable
LAST_TRY = 60.0  # seconds that a client gets at least, also when the server comes back after its deadline


class TooFewReplies(FedquitError):
    """Too few clients answered for a round to be averaged."""


class Unreachable(UnreachableError):
    """Clients that leave did not answer before their deadline."""


class Silent(FedquitError):
    """Clients that leave do not answer, and others would have to wait for them.

    Args:
        clients: who is silent.
    """

    def __init__(self, message: str, clients: Sequence[ClientId]) -> None:
        super().__init__(message)
        self.clients = tuple(clients)


@dataclass(frozen=True)
class _Round:
    """One question to several clients, with what its replies are checked against."""

    ask: Ask
    expected: wire.ExpectedReply
    packed: wire.PackedParams
    invalid: Counter[ClientId] = field(default_factory=Counter)  # invalid replies so far, by client

    @property
    def place(self) -> str:
        return f"round {self.ask.address.round + 1} of phase {self.ask.address.phase!r}"


@dataclass
class GridEngine:
    """Carries out questions over a Flower grid."""

    model: Model
    presence: Presence
    federation: str  # the id under which clients store their memory of this federation
    phase_number: int
    timeout: float  # seconds for an answer
    min_replies: int = 0  # replies that a round needs; 0: half of those asked
    floor: int = 0  # replies with examples without which nothing is averaged
    required: frozenset[ClientId] = frozenset()  # clients that must answer: those that leave
    deadline: float = math.inf  # Unix time until which the required clients are asked again
    grace: float = LAST_TRY  # seconds that they have at least, also when the server comes back after the deadline
    may_wait: Callable[[], bool] = lambda: True  # whether nobody else waits while a required client is silent
    serving: Mapping[ClientId, wire.Serving] = field(default_factory=dict)  # the request that is served, by client
    public: ClientData | None = None  # the server's own data
    anew: int = 0  # the phase in which the model last began anew
    arrived: Callable[[Ask, Reply], None] | None = None  # called with each valid reply as soon as it comes in
    judge: Judge | None = None  # of what a well-formed reply may do to the model
    said: dict[ClientId, int] = field(default_factory=dict)  # the examples that each said last
    began: float = field(init=False)  # Unix time at which this process took the phase up

    def __post_init__(self) -> None:
        self.began = self._clock.now()

    @property
    def _clock(self) -> Clock:
        return self.presence.transport.clock

    @property
    def _end(self) -> float:
        """When required clients are given up: at the deadline, but not before this process has waited a while."""
        self.began = min(self.began, self._clock.now())  # it may have been set back
        return max(self.deadline, self.began + self.grace)

    def run(self, ask: Ask) -> Iterator[Reply]:
        """The replies to a question, in the order of `ask.clients`; those that did not come are left out."""
        if tuple(ask.clients) == (SERVER,):
            yield self._run_on_server(ask)
            return
        replies = self._collect(ask)
        yield from (replies[client] for client in ask.clients if client in replies)

    def _collect(self, ask: Ask) -> dict[ClientId, Reply]:
        """Ask all clients once, and the required ones until they answer, fail `TRIES` times, or run out of time."""
        expected = wire.expected_reply(ask.task, self.model, ask.sent)
        this_round = _Round(ask, expected, wire.PackedParams.of(ask.sent))
        replies: dict[ClientId, Reply] = {}
        required = [c for c in ask.clients if c in self.required]
        to_ask = list(ask.clients)
        tries = 0
        while to_ask:
            for reply in self._ask_once(this_round, to_ask):
                replies[reply.client] = reply
                if self.arrived:
                    self.arrived(ask, reply)
            to_ask = [c for c in required if c not in replies]
            hopeless = [c for c in to_ask if this_round.invalid[c] >= TRIES]
            if hopeless:
                raise Unreachable(f"{self._titles(hopeless)} gave no answer that can be used, {TRIES} times", hopeless)
            self._require_members(to_ask)
            if to_ask:
                tries += 1
                self._require_nobody_waits([c for c in to_ask if not this_round.invalid[c]])
                self._wait_before_retry(to_ask, tries)
        self._require_enough(this_round, replies)
        return {**replies, **self._bounded(this_round, replies)}

    def _bounded(self, this_round: _Round, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Reply]:
        """The replies of clients that stay, as they count."""
        if self.judge is None:
            return {}
        staying = [reply for client, reply in sorted(replies.items()) if client not in self.required]
        counted, too_long = self.judge.bounded(this_round.ask, this_round.expected.like, staying)
        for client in too_long:
            self.presence.transport.say(
                f"the update of {self._titles([client])} in {this_round.place} is far longer than the others': it is "
                "scaled down"
            )
        return counted

    def _ask_once(self, this_round: _Round, clients: Sequence[ClientId]) -> Iterator[Reply]:
        """Send the question to those of the clients that are online; their valid replies as they come in."""
        self.presence.refresh()
        questions: dict[int, wire.Question] = {}  # by node id
        for client in clients:
            if client in self.presence.here:
                questions[self.presence.here[client]] = self._question(this_round.ask, client)
            else:
                self._report_missing(this_round, client, "it is not online")
        messages = []
        for node, question in questions.items():
            content = wire.question_to_records(question, this_round.packed)
            messages.append(OutgoingMessage(node, wire.TRAIN, content))
        for message, reply in self.presence.transport.exchange(messages, self._reply_timeout(clients)):
            question = questions[message.node]
            if isinstance(reply, str):
                self._report_missing(this_round, question.client, reply)
                continue
            try:
                answer = wire.answer_from_records(reply.content, question, this_round.expected)
                judged = self._judged(this_round, question.client, answer.reply)
            except (wire.InvalidMessage, RefusedReply) as error:
                this_round.invalid[question.client] += 1
                self._report_missing(this_round, question.client, str(error))
                continue
            self.presence.on_requests(question.client, answer.pending, answer.settled)
            yield judged

    def _judged(self, this_round: _Round, client: ClientId, reply: Reply) -> Reply:
        self.said[client] = reply.examples
        leaving = client in self.required
        counted = replace(reply, examples=self.presence.counted(client, reply.examples, leaving=leaving))
        if self.judge is not None:
            base = this_round.expected.like
            whole = leaving and self.serving.get(client, wire.Serving()).kind == "client"
            fewest = self.presence.fewest(client) if whole else 0
            self.judge.require_plausible(
                this_round.ask,
                base,
                counted,
                leaving=leaving,
                said=reply.examples,
                fewest=fewest,
                known=max(fewest, self.presence.roster[client].examples) if whole else 0,
            )
        return counted

    def _question(self, ask: Ask, client: ClientId) -> wire.Question:
        return wire.Question(
            ask=replace(ask, clients=(client,)),
            federation=self.federation,
            number=self.phase_number,
            serving=self.serving.get(client, wire.Serving()),
            verdicts=self.presence.verdicts(client),
            received=self.presence.receipts(client),
            anew=self.anew,
        )

    def _reply_timeout(self, clients: Sequence[ClientId]) -> float:
        """Seconds for an answer; where all clients are required, no more than is left until they are given up."""
        if not self.required.issuperset(clients):
            return self.timeout
        left = self._end - self._clock.now()
        return min(self.timeout, max(left, LAST_TRY))

    def _wait_before_retry(self, clients: Sequence[ClientId], tries: int) -> None:
        """Wait, longer each time, or until a client that is offline comes back."""
        now = self._clock.now()
        titles = self._titles(clients)
        if now >= self._end:
            raise Unreachable(f"{titles} did not answer before the deadline", clients)
        self.presence.transport.say(f"asking {titles} again; {self._end - now:.0f} s are left")
        offline = [c for c in clients if c not in self.presence.here]
        pause = PATIENCE if offline else min(PATIENCE, LONGEST_POLL * tries)
        until = min(self._end, now + pause)
        while self._clock.now() < until and not any(c in self.presence.here for c in offline):
            self._clock.sleep(min(LONGEST_POLL, until - self._clock.now()))
            self.presence.refresh()
            self._require_members(offline)
            self._require_nobody_waits(offline)

    def _require_members(self, clients: Sequence[ClientId]) -> None:
        """Raise `Unreachable` for clients that were revoked: they can never answer."""
        revoked = self.presence.revoked().intersection(clients)
        if revoked:
            raise Unreachable(f"{self._titles(sorted(revoked))} takes no part any more", sorted(revoked))

    def _require_nobody_waits(self, silent: Sequence[ClientId]) -> None:
        """Raise `Silent` where somebody else would have to wait for these clients."""
        if silent and self._clock.now() < self._end and not self.may_wait():
            raise Silent(f"{self._titles(silent)} did not answer", silent)

    def _titles(self, clients: Sequence[ClientId]) -> str:
        return ", ".join(self.presence.roster[c].title for c in clients)

    def _require_enough(self, this_round: _Round, replies: Mapping[ClientId, Reply]) -> None:
        """Raise `TooFewReplies` unless enough of the clients that need not answer have done so."""
        optional = [c for c in this_round.ask.clients if c not in self.required]
        needed = min(self.min_replies or math.ceil(len(optional) / 2), len(optional))
        answered = sum(c in replies for c in optional)
        counted = sum(c in replies and replies[c].examples > 0 for c in optional)
        # Beside a client that leaves a method may ask a few others something, which is no mean of theirs alone.
        if optional and counted < self.floor and (not self.required or self.floor <= len(optional)):
            raise TooFewReplies(
                f"{counted} of {len(optional)} clients gave an answer that counts in {this_round.place}, and the "
                f"floor is {self.floor}: look at the log for why."
            )
        if answered < needed:
            raise TooFewReplies(
                f"{answered} of {len(optional)} clients answered in {this_round.place}, and {needed} are needed: "
                "look at the log for why, or lower min_replies."
            )

    def _report_missing(self, this_round: _Round, client: ClientId, reason: str) -> None:
        title = self.presence.roster[client].title
        self.presence.transport.say(f"no reply of {title} in {this_round.place}: {reason}")

    def _run_on_server(self, ask: Ask) -> Reply:
        """Carry a task out on the server's own data, as the simulator does."""
        if self.public is None:
            return Reply(SERVER, {}, 0)
        data = self.public
        fixed = fixed_uniforms(data.numbers, Address(ask.address.seed, "fixed").seed_for(SERVER), data.y.shape[1:])
        examples = replace(Examples.unmarked(data.x, data.y, data.look), fixed=fixed.to(data.y.device))
        used, done = run_visit(self.model, ask, SERVER, {ask.split: examples}, {})
        return Reply(SERVER, done.answer, used, done.loss, done.efforts)
