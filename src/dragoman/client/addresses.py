"""The server of a client that is created without an address.

    DRAGOMAN_URL        with the key in DRAGOMAN_API_KEY
    OPENAI_BASE_URL     with the key in OPENAI_API_KEY
    ANTHROPIC_BASE_URL  with the key in ANTHROPIC_API_KEY

Rules
1. The first variable with a value counts; without any, the server is the default one on this machine.
2. A key belongs to its address, so that it is sent to no other server. OPENAI_API_KEY is the key of addresses at
   openai.com, ANTHROPIC_API_KEY of those at anthropic.com, also if the address is an argument.
3. Arguments come first.
"""

from collections.abc import Mapping

from dragoman.core.urls import DEFAULT, parse_address

KEY_BY_URL = {
    "DRAGOMAN_URL": "DRAGOMAN_API_KEY",
    "OPENAI_BASE_URL": "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL": "ANTHROPIC_API_KEY",
}
KEY_BY_DOMAIN = {"openai.com": "OPENAI_API_KEY", "anthropic.com": "ANTHROPIC_API_KEY"}


def find_server(url: str | None, api_key: str | None, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the address of the server and the key for it."""
    variable = next((name for name in KEY_BY_URL if environ.get(name)), None) if url is None else None
    address = url if url is not None else environ[variable] if variable else DEFAULT
    if api_key is not None:
        return address, api_key
    names = [KEY_BY_URL[variable]] if variable else []
    server = parse_address(address)
    names += [name for domain, name in KEY_BY_DOMAIN.items() if server.is_at(domain)]
    return address, next((environ[name] for name in names if environ.get(name)), None)
