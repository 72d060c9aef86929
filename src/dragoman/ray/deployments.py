"""Builds the Serve application: a deployment for each model, and the entrance with the app."""

import logging
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from dragoman.config.loading import Flags, load, with_absolute_paths
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.models import local_engine
from dragoman.models.engine_loader import OnEngineLost
from dragoman.ray.engine import Replica, ReplicaEngine
from dragoman.server.app import App
from dragoman.server.http.response import Receive, Scope, Send
from dragoman.server.preflight_checks import find_diagnostics
from dragoman.server.routes import build_app

log = logging.getLogger("dragoman")

ARGUMENTS = ("config", "entrance_cpus")
DEFAULT_ONGOING = 16
"""Concurrent requests of a replica without configured slots."""
MAX_ENTRANCE_REQUESTS = 100_000
"""High, so that the limits of the app apply and not those of Serve."""
AUTOSCALING = (
    *("min_replicas", "max_replicas", "target_ongoing_requests", "upscale_delay_s", "downscale_delay_s"),
    *("look_back_period_s", "metrics_interval_s"),
)
SERVE_ID_HEADER = b"x-request-id"
APP_ID_HEADER = b"x-dragoman-request-id"


def app(args: Mapping[str, str]) -> serve.Application:
    """For `serve run dragoman.ray:app`, with `config=FILE` or DRAGOMAN_CONFIG, and `entrance_cpus=NUMBER`."""
    unknown = [name for name in args if name not in ARGUMENTS]
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}; expected config=FILE or entrance_cpus=NUMBER")
    config = load(args.get("config"), Flags(), os.environ)
    warnings = [found for found in find_diagnostics(config.settings) if found.level == "warning"]
    for warning in config.locations.format(warnings):
        log.warning("%s", warning)
    return application(config.settings, entrance_cpus=_parse_cpus(args.get("entrance_cpus", "0")))


def _parse_cpus(text: str) -> float:
    try:
        cpus = float(text)
    except ValueError:
        cpus = math.nan
    if not 0 <= cpus < math.inf:
        raise ConfigError(f"entrance_cpus={text}: expected a number of CPUs, 0 or more")
    return cpus


def application(settings: Settings, *, entrance_cpus: float = 0.0) -> serve.Application:
    """Build the application for `serve.run`. `entrance_cpus` is what Ray reserves for the entrance: by default nothing,
    because an entrance without a free CPU would never start."""
    # Replicas have another working directory.
    settings = with_absolute_paths(settings)
    # The deployments define the models and how long they stay.
    fixed = msgspec.structs.replace(settings, models_dir=(), memory=None, keep_alive=math.inf)
    deployed: list[ModelSpec] = []
    names: dict[str, str] = {}
    """The deployment of each model. Models with the same engine share one."""
    for spec in settings.models:
        if engine_class(spec.engine).runs_elsewhere:
            continue
        other = next((other for other in deployed if other.can_share_engine(spec)), None)
        if other is None:
            # Deployment names allow fewer characters; the number keeps them unique.
            names[spec.name] = f"model-{len(deployed)}-{re.sub(r'[^A-Za-z0-9._-]', '-', spec.name)}"
            deployed.append(spec)
        else:
            # On the machine of the entrance they may not seem to have the same file.
            names[spec.name] = names[other.name]

    def build() -> RequestIdMiddleware:
        return RequestIdMiddleware(_build_app(fixed, names))

    entrance = serve.deployment(serve.ingress(build)()).options(
        name="entrance",
        num_replicas=1,
        max_ongoing_requests=MAX_ENTRANCE_REQUESTS,
        ray_actor_options={"num_cpus": entrance_cpus},
    )
    return entrance.bind(*(_deployment(spec, names[spec.name]).bind(spec, settings.limits) for spec in deployed))


class RequestIdMiddleware:
    """Renames the app's `x-request-id` header, because Ray Serve's proxy adds its own to every reply. It removes the
    header if the app has returned the id that the client sent: then its own id is in the other header already."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_renamed(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent = list(message.get("headers", ()))
                is_renamed = all(name != APP_ID_HEADER for name, _ in sent)
                headers = [header for header in sent if header[0] != SERVE_ID_HEADER]
                if is_renamed:
                    headers += [(APP_ID_HEADER, value) for name, value in sent if name == SERVE_ID_HEADER]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, send_renamed)


def _deployment(spec: ModelSpec, name: str) -> Any:
    scale = spec.ray
    if scale.replicas is None:
        scaling: dict[str, Any] = {
            "autoscaling_config": AutoscalingConfig(**{name: getattr(scale, name) for name in AUTOSCALING})
        }
    else:
        scaling = {"num_replicas": scale.replicas}
    return serve.deployment(Replica).options(
        name=name,
        max_ongoing_requests=_ongoing_requests(spec),
        graceful_shutdown_timeout_s=scale.graceful_shutdown_timeout_s,
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus, "resources": dict(scale.resources)},
        request_router_config=RequestRouterConfig(request_router_class="dragoman.ray.router.PrefixRouter"),
        **scaling,
    )


def _ongoing_requests(spec: ModelSpec) -> int:
    slots = spec.options.get("slots")
    return spec.ray.max_ongoing_requests or (slots if isinstance(slots, int) else DEFAULT_ONGOING)


def _build_app(settings: Settings, names: Mapping[str, str]) -> App:
    """Build the app of the entrance, whose engines are the deployments of these names."""
    app_name = serve.get_replica_context().app_name
    handles = {name: serve.get_deployment_handle(deployed, app_name) for name, deployed in names.items()}

    async def engine_factory(spec: ModelSpec, limits: Limits, on_lost: OnEngineLost) -> Engine:
        if spec.name not in handles:
            return await local_engine(spec, limits, on_lost)
        return ReplicaEngine(spec.name, handles[spec.name], _ongoing_requests(spec) * spec.ray.most)

    app = build_app(settings, engine_factory=engine_factory)
    for model in app.catalog.models.values():
        model.host.load()
    return app
