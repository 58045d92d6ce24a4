# SPDX-License-Identifier: Apache-2.0
"""Questions go out as Flower messages, and what comes back is held against what was asked.

`GridEngine` is an engine like the simulator's: sessions, methods and meters do not know the difference. What differs is
that somebody may not answer. Where the round can go on without, it does; a client that leaves is asked again until its
deadline.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedquit.core import SERVER, ClientId, Model, Reply
from fedquit.engine import Address, Ask, Examples, run_client
from fedquit.engine.plan import fixed_uniforms
from fedquit.errors import FedquitError, UnreachableError
from fedquit.flower import wire
from fedquit.flower.client import ACTION, ClientData
from fedquit.flower.identity import identity_of, is_registered
from fedquit.flower.roster import Identity, Member, Roster

TRAIN, QUERY = f"train.{ACTION}", f"query.{ACTION}"
POLL = (0.05, 3.0)  # seconds between two looks for replies: at first, and at most
TRIES = 3  # of a client that must answer and whose answers are refused: it would give the same one for ever
LAST_TRY = 60.0  # seconds that a client gets at least, also when the server comes back after its deadline
MOST_WORDS = 500  # characters of somebody else's reason
MANY = 12  # clients that are named one by one
PATIENCE = 30.0  # seconds after which a wait is spoken of again, and a silent node asked again


class TooFewReplies(FedquitError):
    """A round that cannot be averaged."""


class NodesMissing(FedquitError):
    """A round that cannot begin."""


class Unreachable(UnreachableError):
    """Clients that leave did not answer before their deadline."""


@dataclass(frozen=True)
class Clock:
    """Time, which tests may hurry."""

    now: Callable[[], float] = time.time  # of day: a deadline outlives the process
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Letter:
    """A message to a node."""

    node: int
    kind: str
    content: RecordDict
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))  # that must come back; it decides nothing else

    def __post_init__(self) -> None:
        wire.stamp(self.content, self.nonce)


Say = Callable[[str], None]


@dataclass(frozen=True)
class Post:
    """Sends letters, and gives each the reply that answers it."""

    grid: Grid
    say: Say
    clock: Clock = Clock()

    def exchange(self, letters: Sequence[Letter], seconds: float) -> Iterator[tuple[Letter, Message | str]]:
        """Each letter with its reply, or with what went wrong, as they come; all are accounted for in the end."""
        if not letters:
            return
        messages = [Message(x.content, x.node, x.kind, ttl=seconds + PATIENCE) for x in letters]
        given = list(self.grid.push_messages(messages))  # a list: it is read twice
        if len(given) < len(messages):  # some grids leave out what they could not send
            given = [m.metadata.message_id if m.metadata.message_id in given else "" for m in messages]
        del messages
        waiting = {number: letter for number, letter in zip(given, letters, strict=True) if number}
        for letter in (letter for number, letter in zip(given, letters, strict=True) if not number):
            yield letter, "the message could not be sent"
        yield from self._replies(waiting, seconds)
        for letter in waiting.values():
            yield letter, f"no answer within {seconds:.0f} s"

    def _replies(self, waiting: dict[str, Letter], seconds: float) -> Iterator[tuple[Letter, Message | str]]:
        answered: set[str] = set()
        end, pause = self.clock.now() + seconds, POLL[0]
        while waiting:
            for number in list(waiting):
                for reply in self._pulled(number):
                    if isinstance(reply, str):
                        yield waiting.pop(number), reply
                        continue
                    to = reply.metadata.reply_to_message_id  # in the sender's own words, which may name any question
                    letter = waiting.pop(number, None) if to == number else None
                    if letter is None:
                        which = (
                            "a second reply to one question"
                            if to in answered
                            else "a reply to no question of this round"
                        )
                        self.say(f"ignored {which}, from node {reply.metadata.src_node_id}")
                        continue
                    answered.add(to)
                    yield letter, _from_who_was_asked(letter, reply)
            if self.clock.now() >= end:
                return
            if waiting:
                self.clock.sleep(pause)
                pause = min(POLL[1], 1.5 * pause)

    def _pulled(self, number: str) -> list[Message | str]:
        """What has come for one question. Flower hands a reply out once: one that cannot be read costs only itself."""
        try:
            return list(self.grid.pull_messages([number]))
        except Exception as error:  # it comes from outside, and fails in as many ways as there are bytes
            self.grid.get_nodes()  # raises where it is not the reply that is at fault, but the way to the SuperLink
            return [f"the reply cannot be read ({type(error).__name__}: {error})"[:MOST_WORDS]]


def _from_who_was_asked(letter: Letter, reply: Message) -> Message | str:
    if reply.has_error():  # from the SuperLink itself, where the node has gone
        reason = " ".join((reply.error.reason or "no reason given").split())
        return f"error {reply.error.code}: {reason[:MOST_WORDS]}"
    source = reply.metadata.src_node_id
    if source and source != letter.node:
        return f"the reply is from node {source}, which was not asked"
    try:
        wire.require_nonce(reply.content, letter.nonce)
    except wire.Refused as error:
        return str(error)
    return reply


Hear = Callable[[ClientId, Sequence[wire.Pending], Sequence[str]], None]
Verdicts = Callable[[ClientId], Mapping[str, str]]


@dataclass
class Nodes:
    """Which client stands behind which node, now."""

    post: Post
    roster: Roster
    hear: Hear
    verdicts: Verdicts
    seconds: float  # for an answer about itself
    here: dict[ClientId, int] = field(default_factory=dict)  # the nodes of clients that are online
    _met: dict[int, ClientId] = field(default_factory=dict)
    _silent: dict[int, tuple[int, float]] = field(default_factory=dict)  # how often, and until when they are left alone

    def refresh(self) -> None:
        """See who is there; whoever is new is asked who it is and whether a request waits."""
        nodes = {n.node_id: n for n in self.post.grid.get_nodes()}
        now = self.post.clock.now()
        self._silent = {i: v for i, v in self._silent.items() if i in nodes}  # who went and came back is asked at once
        new = [n for i, n in nodes.items() if i not in self._met and self._silent.get(i, (0, 0.0))[1] <= now]
        if new:
            self._meet(new)
        self.here = {self._met[i]: i for i in sorted(nodes) if i in self._met}

    def _meet(self, new: Sequence[NodeInfo]) -> None:
        infos = {n.node_id: n for n in new}
        registered = {i: identity_of(n, None) for i, n in infos.items() if is_registered(n)}
        seen: dict[int, tuple[Identity, int, tuple[wire.Pending, ...], tuple[str, ...]]] = {}
        for node, words in self._asked(list(infos), {i: self._known(who) for i, who in registered.items()}):
            identity = identity_of(infos[node], words.get("partition"))
            if identity is None:
                self._leave_alone(node, "it has neither a registered key nor a partition-id")
                continue
            try:
                seen[node] = (identity, wire.examples_from_words(words), *wire.beside_from_words(words))
            except wire.Refused as error:
                self._leave_alone(node, str(error))
        self.roster.enrol((identity, examples) for identity, examples, _, _ in seen.values())
        here: dict[ClientId, tuple[int, tuple[wire.Pending, ...], tuple[str, ...]]] = {}
        for node, (identity, _, pending, settled) in seen.items():
            member = self.roster.by_key(identity.key)
            assert member is not None
            here[member.number] = (node, pending, settled)
        self._met = {i: c for i, c in self._met.items() if c not in here}  # their old nodes are ghosts
        self._met |= {node: client for client, (node, _, _) in here.items()}
        self._announce(sorted(here))
        for client, (_, pending, settled) in sorted(here.items()):
            self.hear(client, pending, settled)

    def _announce(self, clients: Sequence[ClientId]) -> None:
        members = [self.roster[c] for c in clients]
        for member in members[:MANY]:
            self.post.say(f"{member.title} is here, with {member.examples} examples{_mark(member)}")
        if len(members) > MANY:
            self.post.say(
                f"and {len(members) - MANY} more are here, with {sum(m.examples for m in members[MANY:])} examples"
            )

    def _known(self, who: Identity | None) -> ClientId | None:
        member = self.roster.by_key(who.key) if who else None
        return member.number if member else None

    def _asked(
        self, nodes: Sequence[int], clients: Mapping[int, ClientId | None]
    ) -> Iterator[tuple[int, dict[str, object]]]:
        letters = []
        for node in nodes:
            client = clients.get(node)
            verdicts = dict(self.verdicts(client)) if client is not None else {}
            letters.append(Letter(node, QUERY, wire.words_to_records({"verdicts": verdicts})))
        for letter, reply in self.post.exchange(letters, self.seconds):
            try:
                if isinstance(reply, str):
                    raise wire.Refused(reply)
                words = wire.words_from_records(reply.content)
            except wire.Refused as error:
                self._leave_alone(letter.node, str(error))
            else:
                yield letter.node, words

    def _leave_alone(self, node: int, why: str) -> None:
        """For a while, longer each time: a round waits while a node is asked."""
        times = min(self._silent.get(node, (0, 0.0))[0] + 1, 4)
        self._silent[node] = (times, self.post.clock.now() + PATIENCE * 2**times)
        self.post.say(f"node {node} did not say who it is: {why}")

    def sweep(self, clients: Sequence[ClientId]) -> None:
        """Ask those of these clients that are here whether a request waits, and tell them what became of theirs."""
        self.refresh()
        numbers = {self.here[c]: c for c in clients if c in self.here}
        for node, words in self._asked(list(numbers), dict(numbers)):
            try:
                beside = wire.beside_from_words(words)
                self.roster.note({numbers[node]: wire.examples_from_words(words)})
                self.hear(numbers[node], *beside)
            except wire.Refused as error:
                self.post.say(f"{self.roster[numbers[node]].title}: {error}")

    def wait(self, enough: Callable[[], bool], what: str, missing: Callable[[], str], seconds: float) -> None:
        """Until there are enough; it says what it waits for, and for how long, and gives up with a sentence."""
        began, spoken = self.post.clock.now(), -math.inf
        self.refresh()
        while not enough():
            waited = self.post.clock.now() - began
            sentence = f"{what}; after {waited:.0f} s still missing: {missing()}"
            if waited >= seconds:
                raise NodesMissing(f"{sentence}. Start the missing SuperNodes, or ask for fewer, and run again.")
            if self.post.clock.now() - spoken >= PATIENCE:
                spoken = self.post.clock.now()
                self.post.say(f"waiting up to {seconds:.0f} s: {sentence}")
            self.post.clock.sleep(min(POLL[1], max(0.1, seconds - waited)))
            self.refresh()


def _mark(member: Member) -> str:
    return "" if member.authenticated else ", unauthenticated"


@dataclass
class GridEngine:
    """Carries out questions over a Flower grid."""

    model: Model
    nodes: Nodes
    federation: str
    number: int  # of the phase
    seconds: float  # for an answer
    least: int = 0  # replies without which a round cannot go on; 0: half of those asked
    required: frozenset[ClientId] = frozenset()  # who must answer: the clients that leave
    deadline: float = math.inf  # until when
    serving: Mapping[ClientId, wire.Serving] = field(default_factory=dict)
    public: ClientData | None = None  # the server's own data
    arrived: Callable[[Ask, Reply], None] | None = None  # sees each reply as it comes, before any is acted on
    began: float = field(init=False)  # this process, with this phase: a server that comes back late waits a while

    def __post_init__(self) -> None:
        self.began = self.nodes.post.clock.now()

    @property
    def _end(self) -> float:
        return max(self.deadline, self.began + LAST_TRY)

    def run(self, ask: Ask) -> Iterator[Reply]:
        """The replies, in the order of `ask.clients`; some may be missing."""
        if tuple(ask.clients) == (SERVER,):
            yield self._at_server(ask)
            return
        found = self._collected(ask)
        yield from (found[c] for c in ask.clients if c in found)

    def _collected(self, ask: Ask) -> dict[ClientId, Reply]:
        expected, packed = wire.expected_of(ask.task, self.model, ask.sent), wire.Packed.of(ask.sent)
        found: dict[ClientId, Reply] = {}
        must, asked = [c for c in ask.clients if c in self.required], list(ask.clients)
        refused: Counter[ClientId] = Counter()
        tries = 0
        while asked:
            for reply in self._once(ask, asked, expected, packed, refused):
                found[reply.client] = reply
                if self.arrived:
                    self.arrived(ask, reply)
            asked = [c for c in must if c not in found]
            hopeless = [c for c in asked if refused[c] >= TRIES]
            if hopeless:
                raise Unreachable(f"{self._titles(hopeless)} gave no answer that can be used, {TRIES} times", hopeless)
            if asked:
                self._wait_for(asked, tries := tries + 1)
        self._require_enough(ask, found)
        return found

    def _once(
        self,
        ask: Ask,
        clients: Sequence[ClientId],
        expected: wire.Expected,
        packed: wire.Packed,
        refused: Counter[ClientId],
    ) -> Iterator[Reply]:
        self.nodes.refresh()
        questions: dict[int, wire.Question] = {}
        for client in clients:
            if client not in self.nodes.here:
                self._say(ask, client, "it is not online")
                continue
            serving, verdicts = self.serving.get(client, wire.Serving()), self.nodes.verdicts(client)
            own = replace(ask, clients=(client,))
            questions[self.nodes.here[client]] = wire.Question(own, self.federation, self.number, serving, verdicts)
        letters = [Letter(n, TRAIN, wire.question_to_records(q, packed)) for n, q in questions.items()]
        for letter, reply in self.nodes.post.exchange(letters, self._patience(clients)):
            question = questions[letter.node]
            if isinstance(reply, str):
                self._say(ask, question.client, reply)
                continue
            try:
                answer = wire.answer_from_records(reply.content, question, expected)
            except wire.Refused as error:
                refused[question.client] += 1
                self._say(ask, question.client, str(error))
                continue
            self.nodes.hear(question.client, answer.pending, answer.settled)
            yield answer.reply

    def _patience(self, clients: Sequence[ClientId]) -> float:
        """The time for an answer; where all must answer, what is left until the deadline, or a last try's."""
        left = max(self._end - self.nodes.post.clock.now(), LAST_TRY)
        return min(self.seconds, left) if self.required.issuperset(clients) else self.seconds

    def _wait_for(self, clients: Sequence[ClientId], tries: int) -> None:
        """A while, longer each time, or until one that is away is back: it must answer before its deadline."""
        clock, titles = self.nodes.post.clock, self._titles(clients)
        now = clock.now()
        if now >= self._end:
            raise Unreachable(f"{titles} did not answer before the deadline", clients)
        self.nodes.post.say(f"asking {titles} again; {self._end - now:.0f} s are left")
        away = [c for c in clients if c not in self.nodes.here]
        until = min(self._end, now + (PATIENCE if away else min(PATIENCE, POLL[1] * tries)))
        while clock.now() < until and not any(c in self.nodes.here for c in away):
            clock.sleep(min(POLL[1], until - clock.now()))
            self.nodes.refresh()

    def _titles(self, clients: Sequence[ClientId]) -> str:
        return ", ".join(self.nodes.roster[c].title for c in clients)

    def _require_enough(self, ask: Ask, found: Mapping[ClientId, Reply]) -> None:
        optional = [c for c in ask.clients if c not in self.required]
        least = min(self.least or math.ceil(len(optional) / 2), len(optional))
        got = sum(c in found for c in optional)
        if got < least:
            raise TooFewReplies(
                f"{got} of {len(optional)} clients answered in round {ask.address.round + 1} of phase "
                f"{ask.address.phase!r}, and {least} are needed: look at the log for why, or lower min_replies."
            )

    def _say(self, ask: Ask, client: ClientId, why: str) -> None:
        place = f"round {ask.address.round + 1} of phase {ask.address.phase!r}"
        self.nodes.post.say(f"no reply of {self.nodes.roster[client].title} in {place}: {why}")

    def _at_server(self, ask: Ask) -> Reply:
        """A task on the server's own data, as the simulator does it."""
        if self.public is None:
            return Reply(SERVER, {}, 0)
        data = self.public
        fixed = fixed_uniforms(data.numbers, Address(ask.address.seed, "fixed").seed_for(SERVER), data.y.shape[1:])
        mine = replace(Examples.unmarked(data.x, data.y, data.look), fixed=fixed.to(data.y.device))
        done = run_client(self.model, ask.task, mine, ask.sent, ask.address.seed_for(SERVER))
        return Reply(SERVER, done.answer, len(data.y), done.loss)
