"""The user of the application that the app is mounted into.

    identify(scope)   a callable of `create_app`, if there is one, else
    scope["user"]     as authentication middleware sets it: a string, or an object of Starlette or Django

The principal of such a user begins with `host:`, so it is never that of a key. Characters that cannot be printed, which
databases do not store, are escaped.
"""

from collections.abc import Callable, Mapping
from typing import Any

Identify = Callable[[Mapping[str, Any]], str | None]
"""Gets the ASGI scope of a request, and returns the name of its user or None."""
NAMES = ("identity", "display_name", "username")
"""Attributes of user objects, in order of preference."""


def host_principal(scope: Mapping[str, Any], identify: Identify | None) -> str | None:
    """Return the principal of the host application's user; None if it names no user."""
    name = _user_name(scope.get("user")) if identify is None else identify(scope)
    if not name:
        return None
    # The backslash is escaped too, so that different names stay different.
    return f"host:{name}" if name.isprintable() and "\\" not in name else f"host:{ascii(name)[1:-1]}"


def _user_name(user: Any) -> str | None:
    if user is None or isinstance(user, str):
        return user
    if not getattr(user, "is_authenticated", True):
        return None
    for attribute in NAMES:
        try:
            name = getattr(user, attribute, None)
        except NotImplementedError:
            # Starlette's base class declares `identity`, but its SimpleUser has none.
            continue
        if name:
            return str(name)
    return None
