# SPDX-License-Identifier: Apache-2.0
"""The server's side: trains with FedAvg, takes erasure requests, unlearns, recovers, erases, and trains on.

    @app.main()
    def main(grid, context):
        serve(grid, context, model=lambda context: Net())

Flower does not resume runs. Here every step is on disk before the next: start the app again with the same state folder,
and it goes on from the last round that was committed. No checkpoint from before an unlearning survives it.

`intake` takes requests into the ledger, `phases` carries out the phases of `running.lifecycle`, `state_folder` knows
the files.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from logging import INFO
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedquit.core import ClientId, Params, State
from fedquit.core.local_layers import local_names, shared_part
from fedquit.core.method import require_covered
from fedquit.core.params import fingerprint
from fedquit.engine import Address
from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.flower.client import ClientData, ModelOf, functional
from fedquit.flower.config import ServerConfig
from fedquit.flower.intake import Intake
from fedquit.flower.ledger import Erasure, Ledger, read_project, require_listed
from fedquit.flower.log_lines import printable
from fedquit.flower.membership import FILE as SITES
from fedquit.flower.membership import Membership, read_membership
from fedquit.flower.phases import Evaluate, Phases, ServerParts
from fedquit.flower.presence import Presence
from fedquit.flower.roster import Roster
from fedquit.flower.state_folder import StateFolder
from fedquit.flower.transport import Clock, Transport
from fedquit.flower.twice import RESTORE_STATE, TwinStateFile, kept
from fedquit.running.lifecycle import has_been_trained
from fedquit.running.store import locked, save_params
from fedquit.utils.files import write_json

DAY = 86_400.0  # seconds
MUTE_DAYS = 1.0  # without a client, after which the operator is warned of it once a day
LIST_PATIENCE = 10.0  # seconds in which `fedquit flower serve` writes a list of sites again that was damaged
LOOK_AGAIN = 0.5  # seconds between two looks at it
STATUS = 120.0  # seconds in which a node must say who it is; a process starts for that


@dataclass(frozen=True)
class ServerResult:
    """What a run leaves behind."""

    params: Params
    rounds: int  # of ordinary training
    erasures: tuple[Erasure, ...]
    erased: frozenset[ClientId]  # who takes no part any more
    paused: str = ""  # why training pauses before all rounds are trained; "" if it does not
    next_time: float | None = None  # when the next request that waits can be served (Unix time); None: none waits


def serve(
    grid: Grid,
    context: Context,
    *,
    model: ModelOf,
    evaluate: Evaluate | None = None,
    public: ClientData | None = None,
    config: ServerConfig | None = None,
    clock: Clock | None = None,
) -> ServerResult:
    """Run a federation that can forget, from the beginning or from where its state folder says.

    Args:
        grid: Flower's way to the nodes.
        context: of the run; its configuration has the table `fedquit`, see `ServerConfig`.
        model: the network, given the context: the same as the clients'.
        evaluate: the accuracy of a model, in percent, where the server can measure it: ends recoveries, and is noted.
        public: data of the server's own, for methods that need some.
        config: instead of what the context says.
        clock: instead of the machine's.

    Returns:
        The model once all rounds are trained and no request waits, and what became of the requests.
    """
    config = config or ServerConfig.of(context.run_config)
    state = Path(config.state)
    try:
        with _only_server(state):
            state.chmod(0o700)  # whoever else starts the app, with whatever umask
            return _Server(grid, partial(model, context), config, state, evaluate, public, clock or Clock()).run()
    except FedquitError as error:
        log(INFO, "fedquit: stopped: %s", printable(str(error)))
        raise


@contextlib.contextmanager
def _only_server(state: Path) -> Iterator[None]:
    """Hold the state directory, which two servers must never share."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(state))
        except StoreError as error:
            if isinstance(error.__cause__, BlockingIOError):
                raise StoreError(f"another server runs on {state}: stop it, or let it go on alone.") from error
            raise
        yield


class _Server:
    """One run of the server app."""

    def __init__(
        self,
        grid: Grid,
        make_model: Callable[[], object],
        config: ServerConfig,
        state: Path,
        evaluate: Evaluate | None,
        public: ClientData | None,
        clock: Clock,
    ) -> None:
        if config.build_method().needs_public_data and public is None:
            raise InputError(f"{config.method_name} needs data of the server's own: give `public` to serve().")
        self.config = config
        model = functional(make_model)  # type: ignore[arg-type]
        whole = model.init(Address(config.run_seed, "init").seed_for("server"))
        require_covered(config.build_method(), model, whole)
        self.initial = shared_part(model, whole)
        if config.audit and local_names(model):
            raise InputError(
                "fedquit.audit sends a client two whole models, which the server does not have where BatchNorm is "
                "local: set fedquit.audit to false, or average BatchNorm."
            )
        self.clock = clock
        self.folder = StateFolder(state, self.say)
        self.ledger = Ledger(state, {"seed": config.run_seed, "network": fingerprint(self.initial)}, self.say)
        self.roster = Roster(state, self.say)
        self.intake = Intake(state, self.ledger, self.roster, config, self.say, clock.now)
        transport = Transport(grid, self.say, clock)
        seconds = min(config.timeout, STATUS)
        self.nodes = Presence(
            transport,
            self.roster,
            self.intake.hear,
            self.ledger.verdicts,
            seconds,
            self.sites,
            receipts=self.ledger.receipts,
            federation=self.ledger.federation,
        )
        parts = ServerParts(
            config=config,
            model=model,
            initial=self.initial,
            public=public,
            evaluate=evaluate,
            folder=self.folder,
            ledger=self.ledger,
            roster=self.roster,
            nodes=self.nodes,
            intake=self.intake,
            clock=clock,
            say=self.say,
        )
        self.phases = Phases(parts)

    def sites(self) -> dict[str, Membership] | None:
        """Who takes part now, in a closed federation; a list that is damaged or gone is waited for a moment."""
        deadline = self.clock.now() + LIST_PATIENCE
        while True:
            try:
                return self._listed()
            except StoreError:
                if self.clock.now() >= deadline:
                    raise
                self.clock.sleep(LOOK_AGAIN)

    def _listed(self) -> dict[str, Membership] | None:
        """The list of sites as it is on disk; a federation that was closed is never open again."""
        listed = read_membership(self.folder.path)
        if listed is None and self.ledger.closed:
            raise StoreError(
                f"{self.folder.path} holds a closed federation and has no {SITES}, which says who may take part: start "
                "`fedquit flower serve --project`, which writes it."
            )
        return listed

    def say(self, sentence: str) -> None:
        """Tell the operator, and keep it: on one line, whatever a client has put into it."""
        text = printable(sentence)
        log(INFO, "fedquit: %s", text)
        self.folder.append({"event": "note", "text": text})

    def run(self) -> ServerResult:
        """Go on from where the ledger says until all rounds are trained and no request waits."""
        self._begin()
        last_start = self.folder.last_start
        self.folder.note_settings(self.config.noted, self.clock.now())
        self.folder.clean(self.ledger.phase)
        if self.ledger.phase.kind == "erase":
            self.phases.erase()  # before any node is met: a client that asks is told of what is done
        self.nodes.refresh()
        self._note_standing()
        self._warn_of_mute_clients(self.clock.now(), last_start)
        while True:
            while self.phases.go_on():
                pass
            news = [c for c in self.roster.members if self.ledger.verdicts(c) or self.ledger.receipts(c)]
            self.nodes.sweep(news)
            waited = len(self.ledger.waiting)
            self.intake.take()
            settled = len(self.ledger.waiting) < waited
            if not settled and not self.phases.wait_for_turn():
                return self._result()

    def _note_standing(self) -> None:
        self.roster.note_standing(self.ledger.erased, self.nodes.revoked())

    def _require_floor(self) -> None:
        """A closed federation notes that it is one, and averages nothing of fewer than the floor."""
        if self.sites() is None:
            return
        self._bind()
        cohort, floor = self.config.training.clients_per_round, self.config.floor_of(closed=True)
        if 0 < cohort < floor:
            raise InputError(
                f"fedquit.train.clients-per-round is {cohort}, and the floor of this closed federation is {floor}: ask "
                "at least so many in a round, or 0 for all."
            )

    def _bind(self) -> None:
        """Note in the ledger that the federation is closed, and which project it belongs to."""
        project = read_project(self.folder.path)
        if project and self.ledger.project not in ("", project):
            raise StoreError(
                f"{self.folder.path} is of the project whose authority has the fingerprint {self.ledger.project[:16]}, "
                f"and {project[:16]} serves it: give the --project that it belongs to, or another --state."
            )
        is_new = bool(project) and not self.ledger.project
        if self.ledger.closed and not is_new:
            return
        self.ledger.closed = True
        self.ledger.project = self.ledger.project or project
        if kept(self.ledger.path):
            self.ledger.save()
            if is_new:
                self.say(f"{self.folder.path} belongs to the project {project[:16]} from now on: no other serves it")

    def _warn_of_mute_clients(self, now: float, last_start: float | None) -> None:
        """Name the clients that have not been here for long, once a day: requests of theirs would reach nobody."""
        gone = {*self.ledger.erased, *self.nodes.revoked(), *self.nodes.here}
        for client in sorted(self.roster.members.keys() - gone):
            last_seen = self.roster.seen.get(client, now)
            days = (now - last_seen) / DAY
            warned = 0.0 if last_start is None else (last_start - last_seen) / DAY
            if days >= MUTE_DAYS and math.floor(days) > math.floor(warned):
                title = self.roster[client].title
                self.say(f"warning: {title} was last here {days:.0f} days ago: a request of its owner reaches nobody")

    def _begin(self) -> None:
        """The first model, then the ledger: where there is a ledger there is a model."""
        self._require_floor()
        first = self.folder.model(self.ledger.phase)
        has_ledger = kept(self.ledger.path)
        has_clients = kept(self.roster.path)
        if not has_ledger:
            if has_clients or self.folder.has_checkpoints:
                what = "clients" if has_clients else "checkpoints"
                raise StoreError(
                    f"{self.folder.path} has {what} but no {self.ledger.path.name}, which says who must never take "
                    f"part again, as a folder that was copied in part: {RESTORE_STATE}."
                )
            first.save(State(self.initial), 0.0)
            self.ledger.save()
        if not first.exists:
            raise StoreError(
                f"{self.folder.path} has a ledger but no model, as a folder that was copied in part: {RESTORE_STATE}."
            )
        if has_ledger and not has_clients and (self.ledger.knows_clients or self._has_trained(first)):
            raise StoreError(
                f"{self.folder.path} has no {self.roster.path.name}, which says who is who, as a folder that was "
                f"copied in part: {RESTORE_STATE}."
            )
        require_listed(self.folder.path, self.ledger.clients, self.roster.members)

    def _has_trained(self, file: TwinStateFile) -> bool:
        stored = file.load()
        return stored is not None and has_been_trained(stored[0])

    def _result(self) -> ServerResult:
        phase = self.ledger.phase
        stored = self.folder.model(phase).load()
        assert stored is not None, "a phase begins with its model on disk"
        state = stored[0]
        rounds = phase.trained + state.round
        self._note_standing()
        paused = self.phases.paused
        next_time = self.phases.queue(patient=True).next_time()
        if not paused:
            save_params(self.folder.published, state.params)
        entries = tuple(self.ledger.entries.values())
        accuracy = self.phases.accuracy(state)
        result = {
            "rounds": rounds,
            "accuracy": accuracy,
            "paused": paused,
            "next": next_time,
            "erasures": [asdict(e) for e in entries],
        }
        write_json(self.folder.result, result)
        return ServerResult(state.params, rounds, entries, self.ledger.erased, paused, next_time)
