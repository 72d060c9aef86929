"""Finds the client of a request behind trusted proxies.

    X-Forwarded-For   := address ("," address)*      the nearest proxy adds the last one
    X-Forwarded-Proto := scheme ("," scheme)*

Repeated header lines form one list, in order.

Rules
1. Addresses are read from the right while the sender is a trusted proxy. The first address that is not a trusted proxy
   is the client.
2. Reading stops at a value that is not an address.
"""

import ipaddress
from collections.abc import Mapping, Sequence

from dragoman.config.sections import UNIX, parse_network

MAX_HEADER = 1000


class TrustedProxies:
    def __init__(self, trusted: Sequence[str]) -> None:
        self._unix = UNIX in trusted
        self._networks = [known for entry in trusted if (known := parse_network(entry)) is not None]
        self.is_empty = not trusted

    def client(self, peer: str | None, headers: Mapping[bytes, bytes]) -> str | None:
        """The address of the client; None for a Unix socket without a forwarded address."""
        client = peer
        forwarded = headers.get(b"x-forwarded-for", b"")
        hops = forwarded[-MAX_HEADER:].decode("latin-1").split(",")
        if len(forwarded) > MAX_HEADER:
            # The first value may be truncated.
            hops[0] = ""
        while hops and self._trusts(client):
            hop = _address(hops.pop())
            if hop is None:
                break
            client = hop
        return client

    def scheme(self, peer: str | None, headers: Mapping[bytes, bytes]) -> str | None:
        """The scheme of the connection to the nearest proxy; None if the peer is not trusted or sends none."""
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
    """The address without the port that some proxies add; None if it is invalid."""
    text = hop.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
