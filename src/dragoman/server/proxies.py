"""Whose request it is, behind proxies.

    X-Forwarded-For   := address ("," address)*      the nearest proxy is the last to have added one
    X-Forwarded-Proto := scheme ("," scheme)*

Several lines of a header are one list, in the order of the lines.

Rules
1. What a header says is believed only from an address that the configuration names, and so on from the right: the first
   address that is none of the proxies is the client, whatever stands before it.
2. What is no address is not believed, and neither is what stands before it.
3. A request that somebody passed on comes from this machine only where proxies that are trusted say so, to the end.
"""

import ipaddress
from collections.abc import Mapping, Sequence

from dragoman.operation import UNIX, network

LONGEST = 1000
FORWARDING = (b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via")
"""With one of these, somebody in between passed the request on."""


class Proxies:
    def __init__(self, trusted: Sequence[str]) -> None:
        self._unix = UNIX in trusted
        self._networks = [known for entry in trusted if (known := network(entry)) is not None]
        self.is_empty = not trusted

    def client(self, peer: str | None, headers: Mapping[bytes, bytes]) -> str | None:
        """The address of the client; None where it came by a Unix socket and nobody says more."""
        return self._followed(peer, headers)[0]

    def is_local(self, peer: str | None, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the client is on this machine, for sure. A peer without an address is no network's."""
        if not any(name in headers for name in FORWARDING):
            return _is_here(peer)
        found, is_sure = self._followed(peer, headers)
        return self._trusts(peer) and is_sure and _is_here(found)

    def _followed(self, peer: str | None, headers: Mapping[bytes, bytes]) -> tuple[str | None, bool]:
        """The client, and whether everything up to it could be believed and read."""
        found = peer
        forwarded = headers.get(b"x-forwarded-for", b"")
        hops = forwarded[-LONGEST:].decode("latin-1").split(",")
        if len(forwarded) > LONGEST:
            # The first one may be a part of an address.
            hops[0] = ""
        while hops and self._trusts(found):
            hop = _address(hops.pop())
            if hop is None:
                return found, False
            found = hop
        return found, True

    def scheme(self, peer: str | None, headers: Mapping[bytes, bytes]) -> str | None:
        """That of the connection to the nearest proxy; None where the peer is not trusted or does not say."""
        forwarded = headers.get(b"x-forwarded-proto", b"").decode("latin-1").rpartition(",")[2].strip().lower()
        return forwarded if forwarded in ("http", "https") and self._trusts(peer) else None

    def _trusts(self, peer: str | None) -> bool:
        if peer is None:
            return self._unix
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def _address(hop: str) -> str | None:
    """Without the port that some proxies add."""
    text = hop.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _is_here(address: str | None) -> bool:
    try:
        return address is None or ipaddress.ip_address(address).is_loopback
    except ValueError:
        # A socket in the file system, or a test's own transport: not over a network.
        return True
