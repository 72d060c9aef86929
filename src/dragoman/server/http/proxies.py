"""Whose request it is, behind proxies.

    X-Forwarded-For   := address ("," address)*      the nearest proxy is the last to have added one
    X-Forwarded-Proto := scheme ("," scheme)*

Several lines of a header are one list, in the order of the lines.

Rules
1. What a header says is believed only from an address that the configuration names, and so on from the right: the first
   address that is none of the proxies is the client, whatever stands before it.
2. What is no address is not believed, and neither is what stands before it.
"""

import ipaddress
from collections.abc import Mapping, Sequence

from dragoman.config.sections import UNIX, network

LONGEST = 1000


class Proxies:
    def __init__(self, trusted: Sequence[str]) -> None:
        self._unix = UNIX in trusted
        self._networks = [known for entry in trusted if (known := network(entry)) is not None]
        self.is_empty = not trusted

    def client(self, peer: str | None, headers: Mapping[bytes, bytes]) -> str | None:
        """The address of the client; None where it came by a Unix socket and nobody says more."""
        found = peer
        forwarded = headers.get(b"x-forwarded-for", b"")
        hops = forwarded[-LONGEST:].decode("latin-1").split(",")
        if len(forwarded) > LONGEST:
            # The first one may be cut.
            hops[0] = ""
        while hops and self._trusts(found):
            hop = _address(hops.pop())
            if hop is None:
                break
            found = hop
        return found

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
