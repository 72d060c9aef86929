"""Runs Dragoman on a Ray cluster: `serve run dragoman.ray:app`, or `serve.run(application(settings))`.

    clients ──HTTP──> Serve's proxies ──> entrance: the app ──handles──> Replica: an engine
                                                                     └─> Replica: an engine, on another machine

    deployments.py    the Serve application: a deployment for each model, and the entrance
    engine.py         the engine of a model in a replica, and the Engine that the app holds for it
    router.py         Serve's request router
    replica_order.py  chooses replicas, without Ray

Rules
1. Everything except the engines is the same app as elsewhere, in one process, with one count of quotas and queues.
2. An engine that calls other servers (`upstream`) runs in the entrance.
3. Serve decides where to listen, how many replicas there are and where they run.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.ray.deployments import app as app
    from dragoman.ray.deployments import application as application

__all__ = ["app", "application"]


def __getattr__(name: str) -> Any:
    """Import `deployments` on first use, so that the package can be imported without Ray."""
    if name in __all__:
        from dragoman.ray import deployments

        return getattr(deployments, name)
    raise AttributeError(f"module 'dragoman.ray' has no attribute {name!r}")
