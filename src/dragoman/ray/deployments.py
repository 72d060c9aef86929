"""The application: a deployment for each model, and the entrance."""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from dragoman.config.loading import Flags, load_settings
from dragoman.config.model_spec import ModelSpec
from dragoman.config.sections import Replicas
from dragoman.config.settings import Limits, Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.models import made_here
from dragoman.models.model_host import GivenUp, Make
from dragoman.ray.engine import ReplicaEngine
from dragoman.ray.replica import Replica
from dragoman.ray.request_id_header import Renamed
from dragoman.server.app import App
from dragoman.server.factory import build_app

ARGUMENTS = ("config", "entrance_cpus")
ONGOING = 16
"""Requests that a replica takes at once where nobody says how many."""
MOST_AT_THE_DOOR = 100_000
"""The app has limits of its own; Serve's must not come before them."""


def app(args: Mapping[str, str]) -> serve.Application:
    """For `serve run dragoman.ray:app`, with `config=FILE` or DRAGOMAN_CONFIG, and `entrance_cpus=NUMBER`."""
    unknown = [name for name in args if name not in ARGUMENTS]
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}; there are config=FILE and entrance_cpus=NUMBER")
    settings = load_settings(args.get("config"), Flags(), os.environ)
    return application(settings, entrance_cpus=_cpus(args.get("entrance_cpus", "0")))


def _cpus(given: str) -> float:
    try:
        cpus = float(given)
    except ValueError:
        cpus = math.nan
    if not 0 <= cpus < math.inf:
        raise ConfigError(f"entrance_cpus={given}: expected a number of CPUs, 0 or more")
    return cpus


def application(settings: Settings, *, entrance_cpus: float = 0.0) -> serve.Application:
    """The models of these settings, for `serve.run`. `entrance_cpus` is what Ray reserves for the entrance: nothing,
    unless somebody says so, for where there is no CPU left for it, no request would ever be answered."""
    # Which models there are and for how long they stay is said by the deployments.
    fixed = msgspec.structs.replace(settings, models_dir=(), memory=None, keep_alive=math.inf)
    spread = [spec for spec in settings.models if engine_class(spec.engine).device != "elsewhere"]
    # Names of models may have characters that names of deployments may not; two could become the same.
    names = {spec.name: f"model-{at}-{re.sub(r'[^A-Za-z0-9._-]', '-', spec.name)}" for at, spec in enumerate(spread)}

    def build() -> Renamed:
        return Renamed(_app(fixed, names))

    entrance = serve.deployment(serve.ingress(build)()).options(
        name="entrance",
        num_replicas=1,
        max_ongoing_requests=MOST_AT_THE_DOOR,
        ray_actor_options={"num_cpus": entrance_cpus},
    )
    return entrance.bind(*(_deployment(spec, names[spec.name]).bind(spec, settings.limits) for spec in spread))


def _deployment(spec: ModelSpec, name: str) -> Any:
    scale = spec.ray
    return serve.deployment(Replica).options(
        name=name,
        max_ongoing_requests=_ongoing(spec),
        graceful_shutdown_timeout_s=scale.graceful_shutdown_timeout_s,
        ray_actor_options={
            "num_cpus": scale.num_cpus,
            "num_gpus": scale.num_gpus,
            "resources": dict(scale.resources),
        },
        request_router_config=RequestRouterConfig(request_router_class="dragoman.ray.router.PrefixRouter"),
        **({"autoscaling_config": _by_load(scale)} if scale.replicas is None else {"num_replicas": scale.replicas}),
    )


def _by_load(scale: Replicas) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=scale.min_replicas,
        max_replicas=scale.max_replicas,
        target_ongoing_requests=scale.target_ongoing_requests,
        upscale_delay_s=scale.upscale_delay_s,
        downscale_delay_s=scale.downscale_delay_s,
        look_back_period_s=scale.look_back_period_s,
        metrics_interval_s=scale.metrics_interval_s,
    )


def _ongoing(spec: ModelSpec) -> int:
    slots = spec.options.get("slots")
    return spec.ray.max_ongoing_requests or (slots if isinstance(slots, int) else ONGOING)


def _app(settings: Settings, names: Mapping[str, str]) -> App:
    """In the entrance: the app, whose engines are the deployments of these names."""
    here = serve.get_replica_context().app_name

    def make_of(spec: ModelSpec, limits: Limits) -> Make:
        if spec.name not in names:
            return made_here(spec, limits)
        return _made_there(spec, serve.get_deployment_handle(names[spec.name], here))

    app = build_app(settings, make_of=make_of)
    for model in app.catalog.models.values():
        model.host.load()
    return app


def _made_there(spec: ModelSpec, handle: Any) -> Make:
    async def make(given_up: GivenUp) -> Engine:
        return ReplicaEngine(spec.name, handle, _ongoing(spec) * spec.ray.most)

    return make
