# SPDX-License-Identifier: Apache-2.0
"""A site greets the front: both learn the other's version and time, and the site learns why it is not let in.

The greeting needs no Flower, so that a site can say in one sentence what a SuperNode only retries in silence.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fedquit.errors import FedquitError
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.log_lines import printable
from fedquit.utils.version import package_version

if TYPE_CHECKING:
    from fedquit.flower.closed.site_folder import SiteFolder

GREET_PATH = "/fedquit/v1/greet"
MAX_AHEAD = 4.0  # seconds: Flower refuses what a node signs 5 s in the future
MAX_BEHIND = 240.0  # seconds: or more than 305 s ago
GREET_EVERY = 600.0  # seconds between two greetings of a running node
GREET_AGAIN = 60.0  # seconds after one that told of a problem
MAX_VERSION = 40  # characters
NOT_YET_VALID, EXPIRED = 9, 10  # OpenSSL's codes of a certificate's verification
OTHER_NAME = (62, 64)


def flower_version() -> str:
    """The version of Flower that is installed; empty if none is."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Greeting:
    """The versions of fedquit and Flower on one side, and its Unix time."""

    fedquit: str
    flower: str
    time: float  # Unix time

    @classmethod
    def own(cls) -> Greeting:
        """Make the greeting of this process, at this moment."""
        return cls(package_version(), flower_version(), time.time())

    def as_json(self) -> bytes:
        """Return the greeting as the bytes of a JSON object."""
        return json.dumps({"fedquit": self.fedquit, "flower": self.flower, "time": round(self.time, 3)}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Greeting:
        """The greeting that the other side sent. Raises `ValueError` for anything else."""
        try:
            said: Any = json.loads(content)
            greeting = cls(_version(said["fedquit"]), _version(said["flower"]), float(said["time"]))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError("this is no greeting") from error
        if not math.isfinite(greeting.time):
            raise ValueError("this is no time")
        return greeting


def _version(said: object) -> str:
    """A version as the other side said it, made fit for tables and metrics: a lone surrogate cannot be written."""
    return printable(str(said)[:MAX_VERSION])


def differences(server: Greeting, own: Greeting) -> list[str]:
    """What a site should mend, by what the server said: a sentence each."""
    problems = []
    skew = own.time - server.time
    if is_skewed(skew):
        direction = "ahead of" if skew > 0 else "behind"
        problems.append(
            f"the clock of this machine is {in_words(abs(skew))} {direction} the server's, which refuses such a node: "
            "correct it, for example with `timedatectl set-ntp true`."
        )
    if (server.fedquit, server.flower) != (own.fedquit, own.flower):
        problems.append(
            f"this site runs fedquit {own.fedquit} on Flower {own.flower}, and the server fedquit {server.fedquit} on "
            f"Flower {server.flower}: install the server's versions here, or messages may be refused."
        )
    return problems


def is_skewed(ahead: float) -> bool:
    """Whether the SuperLink refuses a node whose clock is so many seconds ahead of its own."""
    return not -MAX_BEHIND <= ahead <= MAX_AHEAD


def in_words(seconds: float) -> str:
    """Return a time span in days, hours, minutes or seconds, with the unit's name."""
    for unit, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def why_not_reached(error: BaseException, address: str) -> str:
    """Why a site did not get through to the front, and what to do: one sentence.

    Args:
        error: what the connection failed with.
        address: host:port of the front.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _why_not_verified(error, address)
    reason = str(getattr(error, "reason", "") or "")
    if "ALERT" in reason:
        return (
            f"the server at {address} refuses this site's certificate ({reason}): ask the operator, who runs "
            "`fedquit flower rotate` with a new request."
        )
    for kinds, sentence in _UNREACHED:
        if isinstance(error, kinds):
            return sentence.format(address=address)
    return f"the server at {address} cannot be reached ({error}): ask the operator whether it runs."


_UNREACHED: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((socket.gaierror,), "the name in {address} is not known here: check the name server, or ask the operator for it."),
    (
        (ConnectionRefusedError,),
        "nothing listens at {address}: ask the operator whether the server runs and the firewall lets you in.",
    ),
    (
        (TimeoutError,),
        "{address} does not answer: ask the operator whether the server runs and the firewall lets you in.",
    ),
    (
        (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected, ssl.SSLEOFError),
        "the server at {address} ended the connection as it does with a site that was revoked, or whose keys were "
        "rotated: ask the operator, and run `fedquit flower join` with --bundle if there is a new bundle.",
    ),
)


def _why_not_verified(error: ssl.SSLCertVerificationError, address: str) -> str:
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    if error.verify_code == NOT_YET_VALID:
        return (
            f"the certificate of {address} is not valid yet by the clock of this machine, which says {now} UTC: "
            "correct the clock."
        )
    if error.verify_code == EXPIRED:
        return (
            f"the certificate of {address} has expired by the clock of this machine, which says {now} UTC: correct the "
            "clock; if it is right, ask the operator whether the front runs."
        )
    if error.verify_code in OTHER_NAME:
        return f"the certificate of {address} is for another name: ask the operator for the address to use."
    return (
        f"{address} shows a certificate of another authority than the one that this site trusts: do not go on; ask the "
        "operator, since it is another server or another project."
    )


def greet(site: SiteFolder) -> list[str]:
    """Greet the front; what the site should mend, a sentence each.

    Raises:
        DeploymentError: if the site is not let in, with the reason.
    """
    own = Greeting.own()
    answer = site.post(GREET_PATH, own.as_json())
    own = replace(own, time=(own.time + time.time()) / 2)  # about when the server looked at its clock
    try:
        server = Greeting.from_json(answer)
    except ValueError as error:
        raise DeploymentError(f"what answers at {site.about['address']} is no front of fedquit: {error}") from error
    return differences(server, own)


@dataclass
class ServerWatch:
    """Greets the front now and then while a node runs, and says what is wrong when that changes."""

    site: SiteFolder
    say: Callable[[str], None]
    _next: float = 0.0  # by the monotonic clock
    _said: tuple[str, ...] = ()

    def look(self) -> None:
        """Greet if the last greeting is long enough ago, and report a change of what is wrong."""
        if time.monotonic() < self._next:
            return
        try:
            problems = tuple(greet(self.site))
        except FedquitError as error:  # also a damaged file: the node goes on without greetings
            problems = (str(error),)
        self._next = time.monotonic() + (GREET_AGAIN if problems else GREET_EVERY)
        if problems != self._said:
            for problem in problems:
                self.say(f"warning: {problem}")
            if not problems:
                self.say("the server lets this site in again.")
            self._said = problems
