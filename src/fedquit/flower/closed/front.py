# SPDX-License-Identifier: Apache-2.0
"""The front: the only port that sites reach. It takes mutual TLS in and passes Flower's fleet service on, nothing else.

    site -- TLS 1.3, certificate of the project's authority --> front -- loopback --> SuperLink

Every request is judged by `rules`, with the list of sites as it is at that moment. A connection ends with its
certificate, and within a second when its site is revoked. The front renews the certificates of sites, and its own, and
takes their notices of requests (`notice_board`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import logging.handlers
import math
import os
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import h11
from cryptography import x509

from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.flower.closed import rules
from fedquit.flower.closed.apps import signatures
from fedquit.flower.closed.authority import Authority, certificate_fingerprint, certificate_to_pem, key_to_pem, new_key
from fedquit.flower.closed.greeting import Greeting
from fedquit.flower.closed.notice_board import NoticeBoard, TooManyNotices
from fedquit.flower.closed.private_files import write_private
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.seen import SeenSites
from fedquit.flower.closed.sites import FILE, Site
from fedquit.flower.deploy.environment import LOOPBACK
from fedquit.flower.token_bucket import SiteLimit, TokenBucket

HANDSHAKE_TIMEOUT = 10.0  # seconds
IDLE_TIMEOUT = 120.0  # seconds between two requests; a SuperNode sends a heartbeat every 30
BODY_TIMEOUT = 120.0  # seconds for a whole request, and for its answer
MAX_HEAD = 16_384  # bytes of a request's first line and headers
MAX_FAB = 64 * 2**20  # bytes of an app's archive
MAX_HANDSHAKES = 64  # connections that have not shown a certificate yet
MAX_HANDSHAKES_OF_PEER = 16  # from one address
MAX_CONNECTIONS = 16  # of one site
MAX_LOG = 10_000_000  # bytes of a file of the log
PIECE = 65_536
FIRST_INHERITED = 3  # the file descriptor of the first socket that a service manager passes on
WATCH = 0.5  # seconds between two looks at the list of sites
UNREADABLE = 5.0  # seconds for which the last list of sites counts when the present one cannot be read
SAY_AGAIN = 10.0  # seconds after which it is written down again that the list of sites cannot be read
RETRY = 60.0  # seconds after which the front tries again to renew its own certificate
ACCEPT_PAUSE = 1.0  # seconds without new connections after one could not be taken
RENEWALS = 4  # certificates that a site may have at once; then one an hour, or sooner if they are short-lived
LATER = "the server cannot do this now: its operator finds the reason in the front's log"


class _TooManyRenewals(InputError):
    """A site asks for certificates too often."""


class _Ended(Exception):
    """The other side closed the connection between two requests."""


@dataclass
class Front:
    """A running front."""

    project: Project
    log: Path  # who asked for what and was refused, one JSON object a line
    _sites: dict[str, Site] = field(default_factory=dict)
    _sites_version: tuple[int, int] = (0, 0)
    _connections: dict[asyncio.StreamWriter, tuple[str, str]] = field(default_factory=dict)  # site, certificate
    _handshakes: Counter[str] = field(default_factory=Counter)  # those under way, by the other side's address
    _unreadable: float | None = None  # since when the list of sites cannot be read, by the monotonic clock
    _said: float = -math.inf  # when that was last written down, by the same
    _own_renewal: float = 0.0  # when the front's own certificate is renewed next (Unix time)
    _own_since: float = 0.0  # before this it is not valid: by a clock that was set back it is renewed at once

    def __post_init__(self) -> None:
        settings = self.project.settings
        self._superlink = settings.superlink_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.load_verify_locations(self.project.folder / "ca.crt")
        self._context.num_tickets = 0  # every connection shows its certificate
        self._log = _bounded_log(self.log)
        self._upstream = ssl.create_default_context(cafile=str(self.project.loopback.authority))
        self._seen = SeenSites(self.log.parent)
        self.board = NoticeBoard(self.log.parent, settings.address)
        self._retry = min(RETRY, settings.certificate_seconds / 10)
        every = min(3600.0, settings.certificate_seconds / RENEWALS)
        self._renewals = SiteLimit(TokenBucket(RENEWALS, every))
        self._start_certificate()
        self._read_sites()

    # Serving ---------------------------------------------------------------------------------------------------------

    async def serve(self, listener: socket.socket) -> None:
        """Take connections for ever, and follow the list of sites: neither goes on without the other."""
        listener.setblocking(False)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._take_connections(listener))

    async def _take_connections(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # for example too many open files
                self._note(cannot=f"take a connection: {_reason(error)}")
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            peer = str(address[0])
            if self._handshakes.total() >= MAX_HANDSHAKES or self._handshakes[peer] >= MAX_HANDSHAKES_OF_PEER:
                self._note(peer=peer, refused="too many handshakes at once")
                connection.close()
                continue
            task = asyncio.create_task(self._accept(connection, peer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _accept(self, connection: socket.socket, peer: str) -> None:
        """Make the handshake, and serve a connection whose certificate is that of a site."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE)
        protocol = asyncio.StreamReaderProtocol(reader)
        self._handshakes[peer] += 1
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT
            )
        except (OSError, ssl.SSLError) as error:
            self._note(peer=peer, refused=f"handshake: {_reason(error)}")
            return
        finally:
            self._handshakes -= Counter({peer: 1})  # drops those that are zero
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        certificate = writer.get_extra_info("ssl_object").getpeercert(True)
        await self._serve_connection(reader, writer, certificate_fingerprint(certificate), peer)

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sha256: str, peer: str
    ) -> None:
        site = self.site_of(sha256)
        if isinstance(site, rules.Refusal):
            self._note(peer=peer, refused=site.reason)
            writer.transport.abort()
            return
        if Counter(name for name, _ in self._connections.values())[site.name] >= MAX_CONNECTIONS:
            self._note(site=site.name, peer=peer, refused="too many connections at once")
            writer.transport.abort()
            return
        self._connections[writer] = (site.name, sha256)
        conversation = _Conversation(self, reader, writer, sha256)
        try:
            await conversation.run()
        except _Ended:
            pass
        except (OSError, TimeoutError, h11.ProtocolError, ssl.SSLError) as error:
            self._note(site=site.name, peer=peer, cut=_reason(error))
        finally:
            del self._connections[writer]
            conversation.close()
            writer.close()

    def site_of(self, sha256: str) -> Site | rules.Refusal:
        """The site that holds a certificate now; nobody, if it cannot be said who was revoked."""
        if self._unreadable is not None and time.monotonic() - self._unreadable > UNREADABLE:
            return rules.Refusal(503, "the server cannot read its list of sites: tell its operator")
        return rules.find_site(self._sites, sha256, time.time())

    def is_newest(self, site: Site, sha256: str) -> bool:
        """Whether a site's certificate is its newest."""
        return site.certificates[-1].sha256 == sha256

    def renew(self, site: Site, request: bytes) -> bytes:
        """A new certificate for a site."""
        if not self._renewals.take(site.name, time.time()):
            raise _TooManyRenewals("certificates are asked for too often: wait an hour.")
        certificate = self.project.renew(site.name, request)
        self._read_sites()
        self._note(site=site.name, renewed=True)
        return certificate

    def note_seen(self, site: Site) -> None:
        """A site has asked for something that it may have."""
        self._seen.note(site.name, time.time())

    def greet(self, site: Site, content: bytes) -> bytes:
        """Answer a site's greeting, and keep what it says of itself for the operator."""
        said = Greeting.from_json(content)
        own = Greeting.own()
        self._seen.note_greeting(site.name, said, own.time)
        return own.as_json()

    def with_signatures(self, answer: bytes) -> bytes:
        """The SuperLink's answer to `get-fab`, with the signatures of the app that it holds."""
        from flwr.proto.fab_pb2 import GetFabResponse

        message = GetFabResponse.FromString(answer)
        added = signatures(hashlib.sha256(message.fab.content).hexdigest(), self.project.apps)
        for name, signature in added.items():
            message.fab.verifications[name] = signature
        return bytes(message.SerializeToString())

    async def connect_upstream(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the SuperLink."""
        return await asyncio.open_connection(
            LOOPBACK, self._superlink, ssl=self._upstream, server_hostname=LOOPBACK, limit=PIECE
        )

    def refused(self, site: str, target: bytes, refusal: rules.Refusal) -> None:
        """Write a refusal down, with the reason that the operator needs."""
        path = target[:80].decode("ascii", "replace")
        self._note(site=site, path=path, refused=refusal.reason, status=refusal.status)

    def _note(self, **what: object) -> None:
        self._log.info(json.dumps({"time": round(time.time(), 3), **what}))

    # What changes while it runs --------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follow the list of sites, end connections whose certificate no longer counts, renew the own certificate."""
        while True:
            await asyncio.sleep(WATCH)
            now = time.time()
            self._follow_sites()
            for writer, (name, sha256) in list(self._connections.items()):
                if isinstance(refusal := self.site_of(sha256), rules.Refusal):
                    self._note(site=name, cut=refusal.reason)
                    writer.transport.abort()
            if not self._own_since <= now <= self._own_renewal:
                try:
                    self._renew_own_certificate()
                except (FedquitError, OSError) as error:  # for example a full disk: the present one counts
                    self._own_since = now
                    self._own_renewal = now + self._retry
                    self._note(cannot=f"renew the front's own certificate: {_reason(error)}")
            with contextlib.suppress(FedquitError, OSError):  # a full disk must not end the front
                self._seen.write_if_due(now)

    def _follow_sites(self) -> None:
        """Read the list of sites if it has changed; write down that it cannot be read, again and again."""
        now = time.monotonic()
        try:
            self._read_sites()
        except (FedquitError, OSError) as error:
            self._sites_version = (0, 0)
            if self._unreadable is None:
                self._unreadable = now
                self._said = -math.inf
            if now - self._said >= SAY_AGAIN:
                self._said = now
                self._note(cannot=f"read the list of sites: {_reason(error)}")
        else:
            self._unreadable = None

    def _read_sites(self) -> None:
        status = (self.project.folder / FILE).stat()
        version = (status.st_mtime_ns, status.st_ino)
        if version != self._sites_version:
            self._sites = self.project.sites
            self._sites_version = version

    def _start_certificate(self) -> None:
        """Renew the own certificate, or start with the last one if that cannot be done and it is still valid."""
        try:
            self._renew_own_certificate()
        except (FedquitError, OSError) as error:
            until = self._valid_until()
            if until <= time.time():
                raise
            self._context.load_cert_chain(self._own)
            self._own_renewal = time.time() + self._retry
            self._note(cannot=f"renew the front's own certificate: {_reason(error)}")

    @property
    def _own(self) -> Path:
        """The front's own key and certificate."""
        return self.project.folder / "front.pem"

    def _valid_until(self) -> float:
        """Until when the own certificate on the disk is valid (Unix time); 0 if there is none."""
        try:
            return x509.load_pem_x509_certificate(self._own.read_bytes()).not_valid_after_utc.timestamp()
        except (OSError, ValueError):
            return 0.0

    def _renew_own_certificate(self) -> None:
        settings = self.project.settings
        hosts = tuple(dict.fromkeys((settings.host, LOOPBACK, "localhost")))
        key = new_key()
        certificate = Authority.load(self.project.folder).issue(
            settings.host, key.public_key(), settings.certificate_seconds, "server", hosts
        )
        path = write_private(self._own, key_to_pem(key) + certificate_to_pem(certificate))
        self._context.load_cert_chain(path)
        self._own_since = certificate.not_valid_before_utc.timestamp()
        self._own_renewal = time.time() + settings.certificate_seconds / 2


class _Conversation:
    """The requests of one connection, one after another, and the connection to the SuperLink behind it."""

    def __init__(self, front: Front, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sha256: str) -> None:
        self._front = front
        self._reader = reader
        self._writer = writer
        self._sha256 = sha256
        self._site = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._link = h11.Connection(h11.CLIENT)
        self._link_reader: asyncio.StreamReader | None = None
        self._link_writer: asyncio.StreamWriter | None = None

    def close(self) -> None:
        """End the connection to the SuperLink."""
        if self._link_writer:
            self._link_writer.close()
            self._link_writer = None

    async def run(self) -> None:
        """Serve requests until the connection ends."""
        go_on = True
        while go_on:
            request = await asyncio.wait_for(self._next_event(), IDLE_TIMEOUT)
            if not isinstance(request, h11.Request):
                return
            async with asyncio.timeout(BODY_TIMEOUT):
                go_on = await self._serve(request)
            if go_on:
                self._site.start_next_cycle()

    async def _serve(self, request: h11.Request) -> bool:
        """Serve one request; whether the connection goes on."""
        site = self._front.site_of(self._sha256)
        headers = [(bytes(name), bytes(value)) for name, value in request.headers]
        decision = (
            site if isinstance(site, rules.Refusal) else rules.judge(site, request.method, request.target, headers)
        )
        if isinstance(site, rules.Refusal) or isinstance(decision, rules.Refusal):
            assert isinstance(decision, rules.Refusal)
            self._front.refused("" if isinstance(site, rules.Refusal) else site.name, request.target, decision)
            await self._answer(decision.status, f"{decision.reason}\n".encode(), last=True)
            return False
        last = not self._front.is_newest(site, self._sha256)  # so that the site comes back with its newest certificate
        self._front.note_seen(site)
        own = {rules.RENEW: self._renew, rules.GREET: self._greet, rules.REQUESTS: self._take_notice}
        if request.target in own:
            return await own[request.target](site)
        try:
            if self._link_writer is None or self._link_writer.is_closing():
                self._link = h11.Connection(h11.CLIENT)
                self._link_reader, self._link_writer = await self._front.connect_upstream()
            await self._pass_request(request, headers, decision)
            return await self._pass_answer(request.target, last=last)
        except FedquitError as error:  # a signature that cannot be read
            self.close()
            return await self._refuse(site, request.target, rules.Refusal(503, str(error)))
        except (OSError, h11.RemoteProtocolError):
            self.close()
            if self._site.our_state is not h11.SEND_RESPONSE:
                raise
            await self._answer(503, b"the SuperLink does not answer\n", last=True)  # a SuperNode tries again
            return False

    async def _renew(self, site: Site) -> bool:
        body = b"".join([piece async for piece in self._body()])
        try:
            certificate = self._front.renew(site, body)
        except FedquitError as error:
            return await self._refuse(site, rules.RENEW, rules.Refusal(_status(error, 403), str(error)))
        await self._answer(200, certificate, last=True)
        return False

    async def _refuse(self, site: Site, target: bytes, refusal: rules.Refusal) -> bool:
        """Answer with a refusal; a site is not told what is wrong with the files of the server."""
        self._front.refused(site.name, target, refusal)
        sentence = LATER if refusal.status == 503 else refusal.reason
        await self._answer(refusal.status, f"{sentence}\n".encode(), last=True)
        return False

    async def _greet(self, site: Site) -> bool:
        body = b"".join([piece async for piece in self._body()])
        try:
            answer = self._front.greet(site, body)
        except ValueError as error:
            return await self._refuse(site, rules.GREET, rules.Refusal(400, str(error)))
        await self._answer(200, answer, last=True)
        return False

    async def _take_notice(self, site: Site) -> bool:
        body = b"".join([piece async for piece in self._body()])
        try:
            answer = self._front.board.take(site.name, body)
        except FedquitError as error:
            return await self._refuse(site, rules.REQUESTS, rules.Refusal(_status(error, 400), str(error)))
        await self._answer(200, answer, last=True)
        return False

    async def _pass_request(self, request: h11.Request, headers: list[tuple[bytes, bytes]], length: int) -> None:
        assert self._link_writer
        passed = [(name, value) for name, value in headers if name in rules.PASSED_HEADERS]
        passed.append((b"host", f"{LOOPBACK}:{self._front.project.settings.superlink_port}".encode()))
        passed.append((b"content-length", str(length).encode()))
        head = h11.Request(method=b"POST", target=request.target, headers=passed)
        self._link_writer.write(self._link.send(head) or b"")
        async for piece in self._body():
            self._link_writer.write(self._link.send(h11.Data(data=piece)) or b"")
            await self._link_writer.drain()
        self._link_writer.write(self._link.send(h11.EndOfMessage()) or b"")
        await self._link_writer.drain()

    async def _pass_answer(self, target: bytes, *, last: bool) -> bool:
        """Pass the SuperLink's answer on; whether the connection goes on."""
        head = await self._next_link_event()
        if not isinstance(head, h11.Response):
            raise h11.RemoteProtocolError("no answer")
        if target == rules.GET_FAB and head.status_code == 200:
            held = bytearray()
            async for piece in self._link_body():
                held += piece
                if len(held) > MAX_FAB:
                    raise h11.RemoteProtocolError("the app is too large")
            await self._answer(200, self._front.with_signatures(bytes(held)), last=last, like=head)
        else:
            passed = [(name, value) for name, value in head.headers if name != b"connection"]
            response = h11.Response(status_code=head.status_code, headers=[*passed, *_closing(last)])
            await self._send(response)
            async for piece in self._link_body():
                await self._send(h11.Data(data=piece))
            await self._send(h11.EndOfMessage())
        if self._link.our_state is h11.DONE and self._link.their_state is h11.DONE:
            self._link.start_next_cycle()
        else:
            self.close()
        return not last and self._site.our_state is h11.DONE and self._site.their_state is h11.DONE

    async def _answer(self, status: int, body: bytes, *, last: bool, like: h11.Response | None = None) -> None:
        kept = [(n, v) for n, v in like.headers if n == b"content-type"] if like else [(b"content-type", b"text/plain")]
        length = (b"content-length", str(len(body)).encode())
        await self._send(h11.Response(status_code=status, headers=[*kept, length, *_closing(last)]))
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        self._writer.write(self._site.send(event) or b"")
        await self._writer.drain()

    async def _next_event(self) -> h11.Event:
        while (event := self._site.next_event()) is h11.NEED_DATA:
            if self._site.they_are_waiting_for_100_continue:
                self._writer.write(self._site.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            self._site.receive_data(await self._reader.read(PIECE))
        if isinstance(event, h11.ConnectionClosed):
            raise _Ended
        if event is h11.PAUSED:
            raise h11.RemoteProtocolError("a request came before the last was answered")
        assert isinstance(event, h11.Request | h11.Data | h11.EndOfMessage)
        return event

    async def _next_link_event(self) -> h11.Event | type[h11.PAUSED]:
        assert self._link_reader
        while (event := self._link.next_event()) is h11.NEED_DATA:
            self._link.receive_data(await self._link_reader.read(PIECE))
        return event  # type: ignore[return-value]

    async def _body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)

    async def _link_body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next_link_event(), h11.Data):
            yield bytes(event.data)


def _bounded_log(path: Path) -> logging.Logger:
    """A log that strangers cannot fill the disk with."""
    log = logging.Logger("front")
    log.addHandler(logging.handlers.RotatingFileHandler(path, maxBytes=MAX_LOG, backupCount=3))
    return log


def _status(error: FedquitError, otherwise: int) -> int:
    """The HTTP status of a refusal: too often, the server's own fault, or else the site's."""
    if isinstance(error, TooManyNotices | _TooManyRenewals):
        return 429
    return 503 if isinstance(error, StoreError) else otherwise


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error) or type(error).__name__


def _closing(last: bool) -> list[tuple[bytes, bytes]]:
    return [(b"connection", b"close")] if last else []


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise StoreError(
            f"cannot listen on {host}:{port} ({error.strerror}): stop the other server, or the other program, that has "
            "this port."
        ) from error


def inherited_listener() -> socket.socket | None:
    """The listening socket that a service manager passed on (`LISTEN_FDS`), if it did.

    The front can then run in a network namespace of its own, whose only opening is this socket.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    return socket.socket(fileno=FIRST_INHERITED)


def main(folder: str, log: str) -> None:
    """Run the front of a project."""
    project = Project.open(Path(folder))
    settings = project.settings
    os.umask(0o077)
    front = Front(project, Path(log))
    with inherited_listener() or listen(settings.listen, settings.port) as listener:
        asyncio.run(front.serve(listener))


if __name__ == "__main__":
    main(*sys.argv[1:3])
