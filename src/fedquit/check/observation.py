# SPDX-License-Identifier: Apache-2.0
"""A spectator of a federation's life that notes every contract which the method breaks.

The method is the user's own object: its hooks are called through wrappers, in which a `GuardedFederation` and a
`GuardedMemory` stand in for what it would get. A task is wrapped likewise where it overrides a hook of `Task`,
whichever hooks `Task` has. So each line says where it was seen: in which phase, round, client and task.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from fedquit.check import rules
from fedquit.check.digest import GENERATORS, data_of_class, data_of_module, digest, random_states
from fedquit.check.guards import Answered, Frame, GuardedFederation, GuardedMemory, ObservedEngine
from fedquit.check.report import Findings
from fedquit.check.rules import Fault, hooks_of, is_of_a_user, is_of_core, is_params, name_of, parts_of
from fedquit.core import SERVER, ClientId, Memory, Reply, Request, Task, Trained
from fedquit.core.method import Method, is_of
from fedquit.engine import Ask, Engine
from fedquit.running.costs import Costs, Metered, Work
from fedquit.running.flops import FORMULAS
from fedquit.running.lifecycle import NOBODY

LOOKED_AT = 4  # calls of each hook of a task, by one client in one round
TRAINING_HOOKS = ("training_task", "watch", "after_round")


class LifeOver(BaseException):
    """A contract is broken in such a way that the life cannot go on."""


@dataclass
class Observer:
    """Looks at one life.

    Attributes:
        kind: of the request, in words.
        request: the request.
        everybody: the numbers of all clients.
        findings: what is broken.
        work: counts FLOPs as the meter does.
        counts: whether FLOPs are counted as they are computed, which may change the last bits of a result.
        explained: whether an error that ends the life follows from what was noted.
        charged: the costs of each phase ("unlearn", "recover"), counted at the engine.
        computed: the FLOPs of each phase that were really computed.
        questions: how many the method asked.
    """

    kind: str
    request: Request
    everybody: tuple[ClientId, ...]
    findings: Findings
    work: Work
    counts: bool = True
    explained: bool = False
    charged: dict[str, Costs] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    questions: int = 0
    _method: Method | None = None
    _phase: str = "request"  # before the training begins
    _round: int | None = None
    _client: ClientId | None = None
    _task: str = ""
    _state: dict[str, str] = field(default_factory=dict)  # digests of what a method must not change
    _classes: dict[type, None] = field(default_factory=dict)  # of the user: the method's, and those of its tasks
    _calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # of a task's hooks, by place
    _writers: dict[str, set[ClientId]] = field(default_factory=dict)  # of each key, whose replies led to it
    _own_before: dict[str, str] = field(default_factory=dict)  # digests of what lay under the leaving clients' numbers

    # Places and notes.

    @property
    def method(self) -> Method:
        """The user's own object."""
        assert self._method is not None, "the life has begun"
        return self._method

    def where(self, client: ClientId | None = None) -> str:
        """The place in words."""
        words = [self._phase if self._round is None else f"{self._phase} round {self._round + 1}"]
        client = self._client if client is None else client
        if client is not None:
            words.append("the server" if client == SERVER else f"client {client}")
        if self._task:
            words.append(f"task {self._task}")
        return f"{', '.join(words)} ({self.kind})"

    def note(self, part: str, fault: Fault | None, client: ClientId | None = None) -> None:
        """Note a violation at this place.

        Args:
            part: of the check.
            fault: what is wrong, if anything.
            client: whom it concerns, where that is not known already.
        """
        if fault:
            self.findings.add(part, fault.code, self.where(client), fault.seen, fault.advice)
            self.explained = self.explained or fault.stops

    def enter(self, phase: str, round: int | None = None) -> None:
        """A phase begins, or a round of it that the method does not drive itself."""
        self._phase, self._round, self._client, self._task = phase, round, None, ""

    # The method.

    def observe(self, method: Method) -> Method:
        """A copy of the method whose hooks are called through wrappers."""
        self._method = method
        self._know_class(type(method), Method)
        self._state |= self._own_state()
        observed = copy.copy(method)
        for name, parameters in hooks_of(type(method)).items():
            object.__setattr__(observed, name, self._wrapped_hook(name, parameters, getattr(method, name)))
        return observed

    def _wrapped_hook(self, name: str, parameters: Sequence[str], own: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - of any hook
            arguments = {**dict(zip(parameters, given, strict=False)), **named}
            with self._at(name, arguments):
                frame = Frame(name)
                lent = [self._lent(key, value, frame) for key, value in arguments.items()]
                with self._pure(frame, _content(arguments)):
                    result = own(*lent)
                self.look_for_state(f"`{name}`")
                self._judge_replies(frame)
                self._judge_result(name, arguments, result)
                return result

        return hook

    @contextmanager
    def _at(self, hook: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """The place of a hook; where it raises an error, the place stays."""
        before = self._phase, self._round, self._client
        if hook in ("unlearn", "recover"):
            self.enter("unlearning" if hook == "unlearn" else "recovery", arguments["state"].round)
        elif hook == "forget":
            self.enter("erasure")
        elif hook in TRAINING_HOOKS and self._phase == "request":
            self.enter("training", arguments.get("round"))
        if hook == "watch":
            self._client = arguments["reply"].client
        elif hook == "training_task":
            self._client = arguments["client"]
        yield
        self._phase, self._round, self._client = before

    def _lent(self, name: str, value: Any, frame: Frame) -> Any:  # noqa: ANN401 - of any hook
        """What a hook gets in the place of an argument."""
        if name == "fed":
            return GuardedFederation(value, self, frame)
        if name == "memory":
            return GuardedMemory(value, self, frame)
        if isinstance(value, Trained):
            return dataclasses.replace(value, memory=GuardedMemory(value.memory, self, frame))
        return value

    def _judge_result(self, hook: str, arguments: Mapping[str, Any], result: Any) -> None:  # noqa: ANN401 - of any hook
        fault = None
        if hook in ("unlearn", "recover"):
            fault = rules.fault_of_state(hook, arguments["state"], result)
        elif hook == "rounds" and (not isinstance(result, int) or isinstance(result, bool) or result < 0):
            fault = Fault("rounds", f"`rounds` returns {result!r}", "return a whole number from 0 on", stops=True)
        elif hook == "training_task":
            self._judge_task(result)
            fault = self._fault_of_foresight(arguments, result)
        self.note("contract", fault)
        if fault and fault.stops:
            raise LifeOver

    def _fault_of_foresight(self, arguments: Mapping[str, Any], result: object) -> Fault | None:
        """A federation trains before anybody asks to be forgotten."""
        method = self.method
        without = method.training_task(arguments["task"], arguments["client"], NOBODY)
        if method.knows_request or without == result:
            return None
        seen = "`training_task` depends on the request, which nobody knows while the federation trains"
        advice = "give all clients the same task, or let `knows_request` return True, for experiments"
        return Fault("future", seen, advice)

    # What a hook must leave alone.

    @contextmanager
    def _pure(self, frame: Frame, arguments: Mapping[str, object]) -> Iterator[None]:
        """Notes what a hook changes: its arguments, what it was lent, the states of global generators.

        What a hook changes in place is noted there, and not again for the hook that led to it.
        """
        before = {name: digest(value) for name, value in arguments.items()}
        generators = random_states()
        noted = self.findings.count("in place")
        yield
        changed = [name for name, value in arguments.items() if digest(value) != before[name]]
        changed += [words for words, value, seen in frame.lent if digest(value) != seen]
        if changed and self.findings.count("in place") == noted:
            seen = f"`{frame.hook}` changes {changed[0]} in place"
            advice = "make new tensors, as `fedquit.core.params.add` and `mix` do"
            self.note("contract", Fault(f"in place {frame.hook}", seen, advice))
        for name in [name for name, state in random_states().items() if state != generators[name]]:
            seen = f"`{frame.hook}` draws from {GENERATORS[name]}"
            self.note("determinism", Fault(f"generator {name}", seen, rules.DRAWING))

    def lend(self, words: str, value: object, frame: Frame) -> None:
        """Note a value that a hook may read and must not change.

        Args:
            words: for it.
            value: the value.
            frame: the hook that gets it.
        """
        frame.lent.append((words, value, digest(value)))

    def look_for_state(self, hook: str) -> None:
        """Note what a method, its class or its module has changed of its own; `hook` is who did it, in words."""
        now = self._own_state() | _state_of(self._classes)
        changed = [words for words, seen in now.items() if self._state.get(words) != seen]
        self._state = now
        if changed:
            seen = f"{hook} changes {changed[0]}: a run that was killed has forgotten it"
            advice = "keep what a later round needs in `state.next(w, name=params)`, or in the memory of `watch`"
            self.note("contract", Fault(f"state {changed[0]}", seen, advice))

    def _own_state(self) -> dict[str, str]:
        members = [entry for cls in type(self.method).__mro__ for entry in vars(cls).items()]
        cached = {name for name, value in members if isinstance(value, cached_property)}
        return {f"self.{name}": digest(value) for name, value in vars(self.method).items() if name not in cached}

    def _know_class(self, cls: type, base: type) -> None:
        """Look at a user's class and its module from now on."""
        own = cls.__mro__[: cls.__mro__.index(base)]
        new = [each for each in own if each not in self._classes]
        if new:
            self._classes |= dict.fromkeys(new)
            self._state = _state_of(new) | self._state  # what is known of their modules stays

    # Questions.

    def judge_question(self, name: str, asked: Mapping[str, Any], present: Sequence[ClientId], frame: Frame) -> str:
        """Judge what a method asks of clients, or of the server.

        Args:
            name: of the federation's function.
            asked: its arguments, by name.
            present: who can be asked now.
            frame: of the hook that asks.

        Returns:
            The place of the question in words.
        """
        self.questions += 1
        parts = parts_of(asked["task"], asked.get("split", "all"))
        self._task = name_of(asked["task"])
        self.look_for_state(f"`{frame.hook}`")
        clients: Sequence[ClientId] = asked.get("clients", ())
        unlearning = self._phase == "unlearning"
        for task, split in parts:
            self._judge_task(task)
            for client in clients:
                fault = rules.fault_of_reading(self.request, client, split, present, unlearning=unlearning)
                self.note("contract", fault, client)
        for client in [c for c, times in Counter(clients).items() if times > 1]:
            seen = f"asks client {client} twice in one question"
            self.note("contract", Fault("twice", seen, "ask each client once, or in two questions"), client)
        if "clients" not in asked and not self.method.needs_public_data:
            seen = f"uses the server's public data (`fed.{name}`) without saying that it needs any"
            advice = "set `needs_public_data = True`, so that a federation without such data refuses the method at once"
            self.note("contract", Fault("public", seen, advice))
        for words, params in asked.get("sent", {}).items():
            self.lend(f"what it sends as {words!r}", params, frame)
        place = self.where()
        self._task = ""
        return place

    def _judge_task(self, task: object) -> None:
        fault = rules.fault_of_task(task)
        self.note("contract", fault)
        if fault and fault.stops:
            raise LifeOver
        self._know_class(type(task), Task)

    def _judge_replies(self, frame: Frame) -> None:
        """Replies that were asked for and not read: the clients have done the work all the same."""
        for place, asked, read in frame.questions:
            if 0 < len(read) < asked:
                seen = (
                    f"asks {asked} clients and reads {len(read)} of the replies: all work, and {len(read)} are charged"
                )
                advice = "ask those whose replies are needed, and read every reply"
                self.findings.add("costs", "unread", place, seen, advice)

    def observe_task(self, task: Any) -> Any:  # noqa: ANN401 - whatever a question may hold
        """What a question holds, with the hooks of a user's tasks called through wrappers."""
        if hasattr(task, "parts"):
            parts = tuple(dataclasses.replace(part, task=self.observe_task(part.task)) for part in task.parts)
            return dataclasses.replace(task, parts=parts)
        observed = copy.copy(task)
        for name, parameters in hooks_of(type(task)).items():
            if not is_of_core(getattr(type(task), name)):
                object.__setattr__(observed, name, self._wrapped_task_hook(name, parameters, getattr(task, name)))
        return observed

    def _wrapped_task_hook(self, name: str, parameters: Sequence[str], own: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - of any hook
            place = self.where(), name
            self._calls[place] += 1
            if self._calls[place] > LOOKED_AT:
                return own(*given, **named)
            arguments = {**dict(zip(parameters, given, strict=False)), **named}
            with self._pure(Frame(name), _content(arguments)):
                result = own(*given, **named)
            if name == "loss":
                self.note("contract", rules.fault_of_loss(result, arguments["batch"].y))
            return result

        return hook

    # The engine: what was really read, and what it took.

    def engine(self, engine: Engine) -> Engine:
        """The engine with every question counted."""
        return ObservedEngine(engine, self)

    def answer(self, ask: Ask, client: ClientId, replies: Iterator[Reply]) -> Reply:
        """Let a client answer, and count the work.

        Args:
            ask: the question.
            client: who answers.
            replies: computes the answer.
        """
        self._client, self._task = client, name_of(ask.task)
        own = is_of_a_user(ask.task)
        counting = own and self.counts
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) if counting else nullcontext() as counter:
            reply = next(replies)
        if own:
            self.look_for_state("a hook of the task")
        costs = self._costs_of(ask, reply)
        charged = costs.client_flops + costs.server_flops
        computed = int(counter.get_total_flops()) if counter else charged  # that of ordinary training is known
        phase = ask.address.phase.partition("-")[0]
        self.charged[phase] = self.charged.get(phase, Costs()) + costs
        self.computed[phase] = self.computed.get(phase, 0) + computed
        self._client, self._task = None, ""
        return reply

    def _costs_of(self, ask: Ask, reply: Reply) -> Costs:
        """What the meter charges for one answer."""
        meter = Metered(Answered(reply), work=self.work)
        task: Any = ask.task
        if reply.client == SERVER:
            meter.run_at_server(task, **ask.sent)
        else:
            list(meter.run(task, [reply.client], split=ask.split, **ask.sent))
        return meter.costs

    # The server's memory.

    def judge_entry(self, hook: str, key: object, value: object) -> None:
        """Judge an entry of the server's memory.

        Args:
            hook: that writes it.
            key: of the entry.
            value: of the entry.
        """
        reply_of = self._client if hook == "watch" else None
        fault = rules.fault_of_entry(hook, key, value, self.everybody, reply_of)
        self.note("contract", fault)
        if fault and fault.stops:
            raise LifeOver
        if not fault and reply_of is not None:
            self._writers.setdefault(str(key), set()).add(reply_of)

    def before_erasure(self, shelf: Memory, homes: Memory) -> None:
        """Judge what lies in the memories once the recovery is over."""
        self.enter("recovery")
        for key, writers in self._writers.items():
            if len(writers) == 1 and not is_of(key, self.everybody):
                (only,) = writers
                self.note("contract", rules.fault_of_key("watch", key, f"holds replies of client {only} alone"))
        entries = {key: shelf[key] for key in shelf}
        self._own_before = {k: digest(v) for k, v in entries.items() if is_of(k, self.request.clients) and v}
        kept = {key.partition("/")[2] for key in homes}
        for name in sorted(kept - set(self.method.at_home)):
            seen = f"clients keep {name!r} at home, which `at_home` does not name: its bytes are not counted"
            self.note("costs", Fault("at home", seen, f"add {name!r} to `at_home`"))

    def erased(self, shelf: Memory) -> None:
        """Judge what is left in the server's memory once the request has been served."""
        self.enter("erasure")
        for key in shelf:
            content = digest(shelf[key])
            for old in [old for old, seen in self._own_before.items() if seen == content][:1]:
                seen = f"what lay in the server's memory under {old!r} is still there under {key!r}"
                advice = "let `forget` delete what belongs to a client, whatever its key"
                self.note("contract", Fault("copied", seen, advice))


def _state_of(classes: Iterable[type]) -> dict[str, str]:
    """A digest of each value that classes and their modules hold, by words for it."""
    held: dict[str, object] = {}
    for cls in classes:
        held |= {f"the class attribute {cls.__name__}.{name}": value for name, value in data_of_class(cls).items()}
    for module in dict.fromkeys(cls.__module__ for cls in classes):
        held |= {f"the global {module}.{name}": value for name, value in data_of_module(module).items()}
    return {words: digest(value) for words, value in held.items()}


def _content(arguments: Mapping[str, Any]) -> dict[str, object]:
    """What must not change in the arguments of a hook, by name; networks and federations are left out."""
    content: dict[str, object] = {}
    for name, value in arguments.items():
        if name in ("fed", "memory", "model"):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [f.name for f in dataclasses.fields(value) if f.name != "memory"]
            content |= {f"`{name}.{part}`": getattr(value, part) for part in parts}
        elif isinstance(value, Mapping) and not is_params(value):
            content |= {f"`{name}[{key!r}]`": part for key, part in value.items()}
        else:
            content[f"`{name}`"] = value
    return content
