"""Connections: how many there may be, and how long one may be held by a client that neither asks nor reads."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Sequence

from uvicorn.protocols.http.h11_impl import H11Protocol

N_CONNECTIONS_MAX = 400
"""Connections open at the same time; a process may often have 1,024 files, and the store needs some too."""

SEND_BUFFER_BYTES = 64 << 10
"""What the system is asked to hold for a client that does not read (Linux takes twice as much). Left to itself it holds
megabytes, minutes of an answer, before anybody can see that nothing is read."""

_HEADER_TIME_S = 20.0
"""How long a client may take from connecting, or from a request's first byte, to the end of its headers."""

_STALLED_S = 12.0
"""How long a client may read nothing while something waits for it."""

_LOOKS = 4  # at a client that something waits for, in that time

_DROP_WHAT_WAITS = struct.pack("ii", 1, 0)  # and do not linger


class Crowd:
    """All connections of a server: ``n_max`` at most, ``n_max_per_address`` of each other machine (of an IPv6 network
    of 64 bits, which one machine may have all of). Where there are too many, the one idle for longest is closed: idle
    connections never keep anybody out."""

    def __init__(self, n_max: int, n_max_per_address: int) -> None:
        self._n_max = n_max
        self._n_max_per_address = n_max_per_address
        self._open: dict[Connection, str] = {}

    def enter(self, one: Connection, address: str) -> bool:
        """Count a connection from an address; False if there is no place, since those there are are all in use."""
        place = _place_of(address)
        if place:
            neighbours = [other for other, its_place in self._open.items() if its_place == place]
            if not self._has_room(neighbours, self._n_max_per_address):
                return False
        if not self._has_room(list(self._open), self._n_max):
            return False
        self._open[one] = place
        return True

    def leave(self, one: Connection) -> None:
        """It is closed; nothing happens if it was not counted."""
        self._open.pop(one, None)

    def _has_room(self, there: Sequence[Connection], n_max: int) -> bool:
        if len(there) < n_max:
            return True
        idle = [one for one in there if one.is_idle]
        if not idle:
            return False
        longest = min(idle, key=lambda one: one.idle_since_s)
        self.leave(longest)
        longest.transport.close()
        return True


def is_loopback(address: str) -> bool:
    """Whether only programs on this machine can reach an IP address, or come from it."""
    return _ip_of(address).is_loopback


def _ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _place_of(address: str) -> str:
    """Whose limit a connection from an address counts to; empty for this machine, whose users have it in common."""
    found = _ip_of(address)
    if found.is_loopback:
        return ""
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


class Connection(H11Protocol):
    """A connection that is closed if its headers do not come in time, if there are too many, or if what was written is
    not read. Nothing more is written while the system has not taken all of what was."""

    crowd: Crowd
    idle_since_s = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _n_unread = 0
    _n_looks = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked by it, and nothing is left to be read."""
        return self._is_between() and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self.idle_since_s = self.loop.time()
        if self.crowd.enter(self, self.client[0] if self.client else "127.0.0.1"):
            self._set_deadline()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_between():
            self._clear_deadline()
        elif self._deadline is None:
            self._set_deadline()

    def on_response_complete(self) -> None:
        self.idle_since_s = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # begun with a good head: what is said of it now would come after this, and fail
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        self._clear_deadline()
        self._stop_looking()
        super().connection_lost(exc)

    def _is_between(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # ------------------------------------------------------------ clients that do not ask

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(_HEADER_TIME_S, self._give_up)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._is_between():
            self.transport.close()

    # ------------------------------------------------------------ clients that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._n_unread, self._n_looks = self.transport.get_write_buffer_size(), 0
        self._look_again()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking()

    def _look_again(self) -> None:
        self._stop_looking()
        self._look = self.loop.call_later(_STALLED_S / _LOOKS, self._see_whether_it_reads)

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _see_whether_it_reads(self) -> None:
        n_unread = self.transport.get_write_buffer_size()
        self._n_looks = self._n_looks + 1 if n_unread >= self._n_unread else 0
        self._n_unread = n_unread
        if self._n_looks >= _LOOKS:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_WHAT_WAITS)
            self.transport.abort()  # to close would be to wait for it
        else:
            self._look_again()


def connections(*, n_max_per_address: int) -> type[Connection]:
    """The connections of one server, counted together."""

    class Counted(Connection):
        crowd = Crowd(N_CONNECTIONS_MAX, n_max_per_address)

    return Counted
