"""Dragoman on a Ray cluster: `serve run dragoman.ray:app`, or `application(settings)` for `serve.run`.

    clients ──HTTP──> Serve's proxies ──> entrance: the app ──handles──> Replica: an engine
                                                                     └─> Replica: an engine, on another machine

    deployments.py  a deployment for each model, and the entrance
    naming.py       the id of a request in its reply
    replica.py      what runs in a replica
    engine.py       what the app holds for a model
    router.py       Serve's router, in the order of choosing.py
    choosing.py     which replica is asked, without Ray
    asked.py        one thing that is asked
    messages.py     what goes between them

Rules
1. Everything but the engines is the same app as elsewhere, in one process: there is one count of quotas and queues.
2. An engine that only asks other servers (`upstream`) lives in the entrance: there is nothing to spread.
3. Serve says where there is listened, how many replicas there are and on which machines they are.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.ray.deployments import app as app
    from dragoman.ray.deployments import application as application

__all__ = ["app", "application"]


def __getattr__(name: str) -> Any:
    """Imported when first used: what needs no Ray can be had without it."""
    if name in __all__:
        from dragoman.ray import deployments

        return getattr(deployments, name)
    raise AttributeError(f"module 'dragoman.ray' has no attribute {name!r}")
