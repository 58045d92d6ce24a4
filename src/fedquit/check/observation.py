# SPDX-License-Identifier: Apache-2.0
"""A spectator of a federation's life that notes every contract which the method breaks.

The method is the user's own object: its hooks are called through wrappers, in which a `GuardedFederation` and a
`GuardedMemory` stand in for what it would get. A task is wrapped likewise where it overrides a hook of `Task`,
whichever hooks `Task` has. So each line says where it was seen: in which phase, round, client and task.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedquit.check.digest import GENERATORS, data_of_class, data_of_module, digest, random_states
from fedquit.check.report import Findings
from fedquit.core import (
    SERVER,
    ClientId,
    Federation,
    Memory,
    Model,
    Params,
    Reply,
    Request,
    Split,
    State,
    Task,
    Trained,
)
from fedquit.core.method import Method, is_of
from fedquit.engine import Ask, Engine
from fedquit.running.costs import Costs, Metered, Work
from fedquit.running.flops import FORMULAS
from fedquit.running.lifecycle import NOBODY
from fedquit.running.recipe import build

SCALARS = (bool, int, float, str)
LOOKED_AT = 4  # calls of each hook of a task, by one client in one round


class LifeOver(BaseException):
    """A contract is broken in such a way that the life cannot go on."""


def public_functions(cls: type) -> list[str]:
    """The names of the hooks that a class defines."""
    return [name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")]


@dataclass
class Frame:
    """A hook that is being called: what it was lent, and the questions that it asked."""

    hook: str
    lent: list[tuple[str, object, str]] = field(default_factory=list)  # in words, the value, its digest
    open_questions: list[tuple[str, int, list[ClientId]]] = field(default_factory=list)  # where, asked, read


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
    """

    kind: str
    request: Request
    everybody: tuple[ClientId, ...]
    findings: Findings
    work: Work
    counts: bool = True
    explained: bool = False  # whether the next error follows from what was noted
    charged: dict[str, Costs] = field(default_factory=dict)  # by phase, counted at the engine
    computed: dict[str, int] = field(default_factory=dict)  # FLOPs that were really computed, by phase
    questions: int = 0
    _method: Method | None = None
    _phase: str = "request"  # before the training begins
    _round: int | None = None
    _client: ClientId | None = None
    _task: str = ""
    _frames: list[Frame] = field(default_factory=list)
    _state: dict[str, str] = field(default_factory=dict)  # digests of what a method must not change
    _classes: dict[type, None] = field(default_factory=dict)
    _calls: Counter[tuple[str, ...]] = field(default_factory=Counter)  # of a task's hooks, by place
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

    def note(self, part: str, code: str, seen: str, advice: str, client: ClientId | None = None) -> None:
        """Note a violation at this place; the arguments are those of `Findings.add`."""
        self.findings.add(part, code, self.where(client), seen, advice)

    def enter(self, phase: str, round: int) -> None:
        """A round of a phase begins that the method does not drive itself."""
        self._phase, self._round = phase, round

    # The method.

    def observe(self, method: Method) -> Method:
        """A copy of the method whose hooks are called through wrappers."""
        self._method = method
        self._know_class(type(method), Method)
        self._state |= self._own_state()
        observed = copy.copy(method)
        for name in public_functions(Method):
            object.__setattr__(observed, name, self._wrapped_hook(name, getattr(method, name)))
        return observed

    def _wrapped_hook(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        _, *parameters = inspect.signature(getattr(Method, name)).parameters

        def hook(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - of any hook
            arguments = {**dict(zip(parameters, given, strict=False)), **named}
            with self._at(name, arguments):
                frame = Frame(name)
                lent = [self._lent(key, value, frame) for key, value in arguments.items()]
                with self._pure(frame, _content(arguments)):
                    result = own(*lent)
                self._judge(name, arguments, result, own)
                return result

        return hook

    @contextmanager
    def _at(self, hook: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """The place of a hook."""
        before = self._phase, self._round, self._client
        if hook in ("unlearn", "recover"):
            self._phase = "unlearning" if hook == "unlearn" else "recovery"
            self._round = arguments["state"].round
        elif hook == "forget":
            self._phase, self._round = "erasure", None
        elif hook in ("training_task", "watch", "after_round") and self._phase == "request":
            self._phase, self._round = "training", arguments.get("round")
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

    def _judge(self, name: str, arguments: Mapping[str, Any], result: Any, own: Callable[..., Any]) -> None:  # noqa: ANN401
        if name in ("unlearn", "recover"):
            self._judge_state(name, arguments["state"], result)
        elif name == "training_task":
            self._judge_training_task(arguments, result, own)
        elif name == "rounds" and (not isinstance(result, int) or isinstance(result, bool) or result < 0):
            self.note("contract", "rounds", f"`rounds` returns {result!r}", "return a whole number from 0 on")
            raise LifeOver

    # What a hook must leave alone.

    @contextmanager
    def _pure(self, frame: Frame, arguments: Mapping[str, object]) -> Iterator[None]:
        """Notes what a hook changes: its arguments, what it was lent, global generators, and state of its own."""
        before = {name: digest(value) for name, value in arguments.items()}
        generators = random_states()
        noted = self.findings.count("in place"), self.findings.count("generator")
        self._frames.append(frame)
        try:
            yield
        finally:
            self._frames.pop()
        changed = [name for name, value in arguments.items() if digest(value) != before[name]]
        changed += [words for words, value, seen in frame.lent if digest(value) != seen]
        if changed and self.findings.count("in place") == noted[0]:
            advice = "make new tensors, as `fedquit.core.params.add` and `mix` do"
            self.note("contract", f"in place {frame.hook}", f"`{frame.hook}` changes {changed[0]} in place", advice)
        drawn = [name for name, state in random_states().items() if state != generators[name]]
        if drawn and self.findings.count("generator") == noted[1]:
            self.note(
                "determinism",
                f"generator {drawn[0]}",
                f"`{frame.hook}` draws from {GENERATORS[drawn[0]]}",
                "draw from `batch.u` or `batch.fixed` in a task, at the server from a generator seeded by `fed.seed`",
            )
        self._close(frame)
        if frame.hook not in self._task_hooks:
            self.look_for_state(f"`{frame.hook}`")

    def lend(self, words: str, value: object, frame: Frame) -> None:
        """Note a value that a hook may read and must not change."""
        frame.lent.append((words, value, digest(value)))

    def _close(self, frame: Frame) -> None:
        """Replies that were asked for and not read: the clients have done the work all the same."""
        for place, asked, read in frame.open_questions:
            if 0 < len(read) < asked:
                self.findings.add(
                    "costs",
                    "unread",
                    place,
                    f"asks {asked} clients and reads {len(read)} of the replies: all of them work, and only "
                    f"{len(read)} of them are charged",
                    "ask those whose replies are needed, and read every reply",
                )

    @property
    def _task_hooks(self) -> frozenset[str]:
        return frozenset(public_functions(Task))

    def look_for_state(self, hook: str) -> None:
        """Note what a method, its class or its module has changed of its own."""
        now = self._own_state() | _state_of(self._classes)
        changed = [words for words, seen in now.items() if self._state.get(words) != seen]
        self._state = now
        if changed:
            self.note(
                "contract",
                f"state {changed[0]}",
                f"{hook} changes {changed[0]}: a run that was killed has forgotten it",
                "keep what a later round needs in `state.next(w, name=params)`, or in the memory of `watch`",
            )

    def _own_state(self) -> dict[str, str]:
        cached = {name for cls in type(self.method).__mro__ for name, v in vars(cls).items() if _is_cached(v)}
        return {f"self.{name}": digest(value) for name, value in vars(self.method).items() if name not in cached}

    def _know_class(self, cls: type, base: type) -> None:
        """Look at a user's class and its module from now on."""
        own = cls.__mro__[: cls.__mro__.index(base)]
        new = [each for each in own if each not in self._classes]
        if new:
            self._classes |= dict.fromkeys(new)
            self._state = _state_of(new) | self._state  # what is known of their modules stays

    # What a hook returns.

    def _judge_state(self, hook: str, before: State, after: object) -> None:
        advice = "return `state.next(params)`"
        if not isinstance(after, State):
            self._end("contract", "no state", f"`{hook}` returns {type(after).__name__}", advice)
            return
        if after.round != before.round + 1:
            seen = f"`{hook}` returns a state at round {after.round} after round {before.round}"
            self._end("contract", "round", seen, advice)
        self._judge_params(hook, before.params, after.params)
        for name, part in after.kept.items():
            if not is_params(part):
                seen = f"`{hook}` keeps {name!r}, which is a {type(part).__name__}"
                self._end("contract", "kept", seen, "keep sets of tensors by name")

    def _judge_params(self, hook: str, before: Params, after: object) -> None:
        seen, advice = "", "return the parameters of the model, all of them, as `state.params` has them"
        if not is_params(after):
            seen = f"`{hook}` returns parameters that are a {type(after).__name__}, not tensors by name"
        elif after.keys() != before.keys():
            names = ", ".join(sorted(after.keys() ^ before.keys())[:3])
            seen = f"`{hook}` returns a model with other parameters ({names})"
        elif list(after) != list(before):
            seen = f"`{hook}` returns the parameters in another order ({', '.join(list(after)[:3])}, …)"
            advice = "keep the order of `state.params`: methods speak of the first and the last layer"
        if seen:
            self._end("contract", "parameters", seen, advice)
            return
        for name, tensor in after.items():
            like = before[name]
            if tensor.shape != like.shape:
                seen = f"{name!r} has shape {tuple(tensor.shape)} where the model has {tuple(like.shape)}"
            elif tensor.dtype != like.dtype:
                seen = f"{name!r} is {tensor.dtype} where the model has {like.dtype}"
            elif not bool(torch.isfinite(tensor).all()):
                seen = f"{name!r} holds NaN or infinity"
                advice = "lower the learning rate or clip the gradient"
            elif tensor.requires_grad:
                seen = f"{name!r} still hangs on an autograd graph"
                advice = "return detached tensors"
            if seen:
                self._end("contract", "parameters", f"`{hook}` returns a model in which {seen}", advice)
                return

    def _end(self, part: str, code: str, seen: str, advice: str) -> None:
        self.note(part, code, seen, advice)
        raise LifeOver

    def _judge_training_task(self, arguments: Mapping[str, Any], result: Any, own: Callable[..., Any]) -> None:  # noqa: ANN401
        self.judge_task(result)
        if not self.method.knows_request and own(arguments["task"], arguments["client"], NOBODY) != result:
            self.note(
                "contract",
                "future",
                "`training_task` depends on the request, which nobody knows while the federation trains",
                "give all clients the same task, or let `knows_request` return True, for experiments",
            )

    # Questions.

    def judge_task(self, task: object) -> None:
        """A task can be sent: scalar fields, and a class that a client can find by its name."""
        if not isinstance(task, Task):
            self._end("contract", "task", f"asks for {type(task).__name__}, which is no Task", "derive it from Task")
            return
        self._know_class(type(task), Task)
        name = type(task).__qualname__
        hidden = vars(task).keys() - {f.name for f in dataclasses.fields(task)}
        wrong = [f"{key} is a {type(value).__name__}" for key, value in _leaves(task) if not isinstance(value, SCALARS)]
        advice = "give the task scalar fields, and send tensors with `fed.run(task, clients, name=params)`"
        if not vars(type(task)).get("__dataclass_params__"):
            seen, advice = f"the task {name} is no dataclass", "write @dataclass(frozen=True) above its class"
        elif hidden:
            seen = f"the task {name} carries {sorted(hidden)[0]!r}, which is no field and would not be sent"
        elif wrong:
            seen = f"a field of the task {name} cannot be sent: {wrong[0]}"
        elif "<locals>" in name:
            seen = f"the task {name} is defined inside a function, where no client can find it by its name"
            advice = "define its class in the module"
        elif (error := _error_of_sending(task)) is not None:
            seen = f"the task {name} cannot be read again once it is sent ({error})"
            advice = "let its fields have the types that it declares"
        else:
            return
        self.note("contract", "task", seen, advice)

    def begin_question(self, task: object) -> None:
        """A method asks clients, or the server itself, to do a task."""
        self.questions += 1
        self._task = type(task).__name__
        self.judge_task(task)

    def end_question(self) -> str:
        """The question has been judged; return its place in words."""
        place = self.where()
        self._task = ""
        return place

    def judge_public_data(self, question: str) -> None:
        """Whether a method said that it needs the server's public data; `question` is how it asks for them."""
        if not self.method.needs_public_data:
            self.note(
                "contract",
                "public",
                f"uses the server's public data (`fed.{question}`) without saying that it needs any",
                "set `needs_public_data = True`, so that a federation without such data refuses the method at once",
            )

    def judge_question(self, clients: Sequence[ClientId], split: str, present: Sequence[ClientId]) -> None:
        """Which data a method may read, of whom, and when.

        Args:
            clients: who is asked.
            split: for which part of their data.
            present: who can be asked.
        """
        gone = [] if self.request.samples else list(self.request.clients)
        unlearning = self._phase == "unlearning"
        for client in clients:
            leaving = client in self.request.clients
            if client in gone and not unlearning:
                self.explained = True
                seen, advice = "asks a client that has left", "ask `request.stay(fed.clients)`"
            elif client not in present:
                self.explained = True
                seen, advice = "asks a client that cannot be asked", "ask those in `fed.clients`"
            elif client in gone and split != "forget":
                seen = f"asks a leaving client for its {split!r} data"
                advice = 'ask leaving clients with split="forget"'
            elif not leaving and split == "forget":
                seen = "asks a client that stays for forget data, of which it has none"
                advice = 'ask those who stay with split="retain"'
            elif leaving and not unlearning and split != "retain":
                self.explained = split == "forget"
                seen = f"asks for {split!r} data in the recovery, when the forgotten samples must not be read"
                advice = 'ask with split="retain"; forget data is for `unlearn` alone'
            else:
                continue
            self.note("contract", f"read {seen}", seen, advice, client)
        twice = next((c for c in clients if list(clients).count(c) > 1), None)
        if twice is not None:
            seen = f"asks client {twice} twice in one question"
            self.note("contract", "twice", seen, "ask each client once, or in two questions", twice)

    def observe_task(self, task: Task) -> Task:
        """A copy of a task whose own hooks are called through wrappers."""
        observed = copy.copy(task)
        for name in public_functions(Task):
            if getattr(type(task), name) is not getattr(Task, name):
                object.__setattr__(observed, name, self._wrapped_task_hook(name, getattr(task, name)))
        return observed

    def _wrapped_task_hook(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        _, *parameters = inspect.signature(getattr(Task, name)).parameters

        def hook(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - of any hook
            place = (self.where(), name)
            self._calls[place] += 1
            if self._calls[place] > LOOKED_AT:
                return own(*given, **named)
            arguments = {**dict(zip(parameters, given, strict=False)), **named}
            with self._pure(Frame(name), _content(arguments)):
                result = own(*given, **named)
            if name == "loss" and (not isinstance(result, Tensor) or result.shape != arguments["batch"].y.shape[:1]):
                shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                seen = f"`loss` returns {shape} for a batch of {len(arguments['batch'].y)}"
                self.note("contract", "loss", seen, "return the loss of each example, (B,), and no mean")
            return result

        return hook

    # The engine: what was really read, and what it took.

    def engine(self, engine: Engine) -> Engine:
        """The engine with every question counted."""
        return ObservedEngine(engine, self)

    def answering(self, ask: Ask, client: ClientId, reply: Callable[[], Reply]) -> Reply:
        """Let a client answer, and count the work.

        Args:
            ask: the question.
            client: who answers.
            reply: computes the answer.
        """
        self._client, self._task = client, type(ask.task).__name__
        phase = ask.address.phase.partition("-")[0]
        own = is_of_a_user(ask.task)
        counting = own and self.counts
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) if counting else nullcontext() as counter:
            answer = reply()
        meter = Metered(Answered(answer), work=self.work)
        if client == SERVER:
            meter.run_at_server(ask.task, **ask.sent)
        else:
            list(meter.run(ask.task, [client], split=ask.split, **ask.sent))
        self.charged[phase] = self.charged.get(phase, Costs()) + meter.costs
        charged = meter.costs.client_flops + meter.costs.server_flops
        computed = int(counter.get_total_flops()) if counter else charged  # that of ordinary training is known
        self.computed[phase] = self.computed.get(phase, 0) + computed
        if own:
            self.look_for_state("a hook of the task")
        self._client, self._task = None, ""
        return answer

    # The server's memory.

    def wrote(self, key: object, value: object, hook: str) -> None:
        """Judge an entry of the server's memory: its key and its value."""
        if not isinstance(key, str) or not is_params(value):
            seen = f"`{hook}` keeps a {type(value).__name__} in the server's memory under {key!r}"
            self._end("contract", "entry", seen, "keep sets of tensors, by name, under a string")
            return
        plain = key.removesuffix("/")
        named = [c for c in self.everybody if re.search(rf"(?<!\d)0*{c}(?!\d)", plain)]
        if any(not is_of(plain, [c]) for c in named):
            self._note_key(hook, key, f"names client {named[0]}, and not as its last part")
        elif hook == "watch" and self._client is not None:
            self._writers.setdefault(plain, set()).add(self._client)
            if is_of(plain, self.everybody) and not is_of(plain, [self._client]):
                self._note_key(hook, key, f"is of another client than the reply's, {self._client}")

    def _note_key(self, hook: str, key: str, why: str) -> None:
        self.note(
            "contract",
            "key",
            f"`{hook}` keeps something in the server's memory under {key!r}, which {why}",
            'end the key of what belongs to one client with "/" and its number, so that it is deleted with the client',
        )

    def before_erasure(self, shelf: Memory, homes: Memory) -> None:
        """Judge what lies in the memories once the recovery is over."""
        self._phase, self._round, self._client, self._task = "recovery", None, None, ""
        for key, writers in self._writers.items():
            if len(writers) == 1 and not is_of(key, self.everybody):
                (only,) = writers
                self._note_key("watch", key, f"was written with replies of client {only} alone")
        entries = {key: shelf[key] for key in shelf}
        self._own_before = {k: digest(v) for k, v in entries.items() if is_of(k, self.request.clients) and v}
        kept = {key.partition("/")[2] for key in homes}
        for name in sorted(kept - set(self.method.at_home)):
            seen = f"clients keep {name!r} at home, which `at_home` does not name: its bytes are not counted"
            self.note("costs", "at home", seen, f"add {name!r} to `at_home`")

    def erased(self, shelf: Memory) -> None:
        """Judge what is left in the server's memory once the request has been served."""
        self._phase, self._round, self._client, self._task = "erasure", None, None, ""
        for key in shelf:
            copied = next((old for old, seen in self._own_before.items() if seen == digest(shelf[key])), "")
            if copied:
                self.note(
                    "contract",
                    "copied",
                    f"what lay in the server's memory under {copied!r} is still there under {key!r}",
                    "let `forget` delete what belongs to a client, whatever its key",
                )


def is_of_a_user(task: Task) -> bool:
    """Whether a task is not that of ordinary training."""
    return not type(task).__module__.startswith("fedquit.core.")


def _state_of(classes: Iterable[type]) -> dict[str, str]:
    """A digest of each value that classes and their modules hold, by words for it."""
    held: dict[str, object] = {}
    for cls in classes:
        held |= {f"the class attribute {cls.__name__}.{name}": value for name, value in data_of_class(cls).items()}
    for module in dict.fromkeys(cls.__module__ for cls in classes):
        held |= {f"the global {module}.{name}": value for name, value in data_of_module(module).items()}
    return {words: digest(value) for words, value in held.items()}


def _is_cached(value: object) -> bool:
    return isinstance(value, cached_property)


def _content(arguments: Mapping[str, Any]) -> dict[str, object]:
    """What must not change in the arguments of a hook, by name; networks and federations are left out."""
    content: dict[str, object] = {}
    for name, value in arguments.items():
        if name in ("fed", "memory", "model"):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [
                f.name for f in dataclasses.fields(value) if not (isinstance(value, Trained) and f.name == "memory")
            ]
            content |= {f"`{name}.{part}`": getattr(value, part) for part in parts}
        elif isinstance(value, Mapping) and not is_params(value):
            content |= {f"`{name}[{key!r}]`": part for key, part in value.items()}
        else:
            content[f"`{name}`"] = value
    return content


def is_params(value: object) -> bool:
    """Whether a value is a set of tensors by name."""
    return isinstance(value, dict) and all(isinstance(n, str) and isinstance(p, Tensor) for n, p in value.items())


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The innermost fields of a dataclass, through other dataclasses and tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _leaves(getattr(value, f.name), f"{name}.{f.name}" if name else f.name)
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item, name)
    else:
        yield name, value


def _error_of_sending(task: Task) -> Exception | None:
    """Why a task is not the same once it has been sent and read; None where it is."""
    try:
        again = build(type(task), dataclasses.asdict(task), "task")
    except Exception as error:  # a user's class may do anything
        return error
    return None if again == task else ValueError("it has changed on the way")


class GuardedFederation:
    """A federation that notes whom a method asks, for what, and whether it goes around."""

    def __init__(self, fed: Federation, observer: Observer, frame: Frame) -> None:
        self.__fed = fed
        self.__observer = observer
        self.__frame = frame

    @property
    def model(self) -> Model:
        """The network that everybody trains."""
        return GuardedModel(self.__fed.model, self.__observer)

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that can be asked now."""
        return self.__fed.clients

    @property
    def seed(self) -> int:
        """Of the server's own draws."""
        return self.__fed.seed

    def run(self, task: Task, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params) -> Iterator[Reply]:
        """Ask clients to do a task."""
        return self.__ask("run", task, clients, split=split, **sent)  # type: ignore[no-any-return]

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """Do a task on the server's own public data."""
        return self.__ask("run_at_server", task, **sent)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else a federation has
        if name in public_functions(Federation):

            def asked(*given: Any, **named: Any) -> Any:  # noqa: ANN401
                return self.__ask(name, *given, **named)

            return asked
        if not name.startswith("__"):
            self.__observer.explained = True
            self.__observer.note(
                "costs",
                "inside",
                f"reaches for `fed.{name}`, which is no part of a Federation: what is done through it is not charged",
                "ask clients through `fed.run` and `fed.run_at_server` alone",
            )
        raise AttributeError(f"a Federation has no attribute {name!r}")

    def __ask(self, name: str, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - as the question wants it
        observer = self.__observer
        observer.look_for_state(f"`{self.__frame.hook}`")
        bound = inspect.signature(getattr(Federation, name)).bind(None, *given, **named)
        bound.apply_defaults()
        asked = bound.arguments
        observer.begin_question(asked["task"])
        if "clients" in asked:
            asked["clients"] = list(asked["clients"])
            observer.judge_question(asked["clients"], asked.get("split", "all"), self.__fed.clients)
        else:
            observer.judge_public_data(name)
        for words, params in asked.get("sent", {}).items():
            observer.lend(f"what it sends as {words!r}", params, self.__frame)
        place = observer.end_question()
        answer = getattr(self.__fed, name)(*bound.args[1:], **bound.kwargs)
        if "clients" not in asked or not isinstance(answer, Iterator):
            return answer
        return self.__read(answer, place, len(asked["clients"]))

    def __read(self, replies: Iterator[Reply], place: str, asked: int) -> Iterator[Reply]:
        read: list[ClientId] = []
        self.__frame.open_questions.append((place, asked, read))
        for reply in replies:
            read.append(reply.client)
            if isinstance(reply, Reply):
                self.__observer.lend(f"the reply of client {reply.client}", reply.params, self.__frame)
            yield reply


class GuardedModel:
    """A network that notes when the server runs it itself."""

    def __init__(self, model: Model, observer: Observer) -> None:
        self.__model = model
        self.__observer = observer

    def init(self, seed: int) -> Params:
        """Fresh parameters."""
        return self.__model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits."""
        self.__observer.note(
            "costs",
            "network",
            "the server runs the network itself, which nobody charges",
            "let clients do it in a task, or the server on its public data with `fed.run_at_server`",
        )
        return self.__model(params, x)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else a network has
        return getattr(self.__model, name)


class GuardedMemory(MutableMapping[str, Params]):
    """The server's memory, with its keys and values judged."""

    def __init__(self, memory: Memory, observer: Observer, frame: Frame) -> None:
        self._memory = memory
        self._observer = observer
        self._frame = frame

    def __getitem__(self, key: str) -> Params:
        value = self._memory[key]
        self._observer.lend(f"what lies in the server's memory under {key!r}", value, self._frame)
        return value

    def __setitem__(self, key: str, params: Params) -> None:
        self._observer.wrote(key, params, self._frame.hook)
        self._memory[key] = params

    def __delitem__(self, key: str) -> None:
        del self._memory[key]

    def __contains__(self, key: object) -> bool:
        return key in self._memory

    def __iter__(self) -> Iterator[str]:
        return iter(self._memory)

    def __len__(self) -> int:
        return len(self._memory)


@dataclass(frozen=True)
class ObservedEngine:
    """An engine whose clients answer one by one, each counted."""

    inner: Engine
    observer: Observer

    @property
    def model(self) -> Model:
        """The network that everybody trains."""
        return self.inner.model

    def run(self, ask: Ask) -> Iterator[Reply]:
        """The replies, in the order of `ask.clients`."""
        task = self.observer.observe_task(ask.task) if is_of_a_user(ask.task) else ask.task
        for client in ask.clients:
            alone = dataclasses.replace(ask, task=task, clients=(client,))
            yield self.observer.answering(ask, client, lambda alone=alone: next(iter(self.inner.run(alone))))  # type: ignore[misc]


@dataclass(frozen=True)
class Answered:
    """A federation with one answer, for a meter."""

    reply: Reply

    @property
    def model(self) -> Model:
        """There is none."""
        raise NotImplementedError

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Who has answered."""
        return (self.reply.client,)

    @property
    def seed(self) -> int:
        """Nobody draws."""
        return 0

    def run(self, task: Task, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params) -> Iterator[Reply]:
        """The answer."""
        return iter([self.reply])

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """The answer."""
        return self.reply.params
