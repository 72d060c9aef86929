"""Decides which IP addresses a request may make the server connect to.

Rules
1. An address must be public, or in a network that the operator allows.
2. An IPv6 address that contains an IPv4 address (mapped, 6to4, NAT64, Teredo) stands for that one.
3. If a name has several addresses, all of them must be allowed.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dragoman.config.sections import Network
from dragoman.core.errors import quote

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NAT64 = ipaddress.ip_network("64:ff9b::/96")
SPECIAL = [ipaddress.ip_network(entry) for entry in ("192.0.0.0/24", "168.63.129.16/32")]
"""Networks that count as public, but are not, or that clouds use for their own services."""
RESOLVER_THREADS = 4


class AddressRefused(Exception):
    """The message can be shown to callers."""


class Resolver:
    """Looks names up in threads of its own: a slow name server must not block other work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="dragoman-resolver")

    async def resolve(self, host: str, port: int, allowed: Sequence[Network]) -> str:
        """Return an address of the host. Raises AddressRefused if it may not be used."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _look_up, host.strip("[]"), port)
        except (OSError, UnicodeError):
            raise AddressRefused("the name of the server cannot be resolved") from None
        addresses = [ipaddress.ip_address(entry.partition("%")[0]) for entry in found]
        if not addresses or not all(is_allowed(address, allowed) for address in addresses):
            message = f"the host {quote(host)} resolves to an address that is not public"
            raise AddressRefused(f"{message}; the operator can allow it in `mcp.allow_addresses`")
        return str(addresses[0])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_allowed(address: Address, allowed: Sequence[Network]) -> bool:
    inner = _inner_address(address)
    if any(inner in network or address in network for network in allowed):
        return True
    if any(inner in network for network in SPECIAL):
        return False
    return all(one.is_global and not one.is_multicast for one in (address, inner))


def _inner_address(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None) or address
