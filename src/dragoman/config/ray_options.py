"""The section `ray` of a model: how many replicas it has under `dragoman.ray`, and what each of them takes.

    ray := {replicas: COUNT}
         | {min_replicas, max_replicas, target_ongoing_requests, upscale_delay_s, downscale_delay_s,
            look_back_period_s, metrics_interval_s}
           and max_ongoing_requests, num_cpus, num_gpus, resources, graceful_shutdown_timeout_s

The names are those of Ray Serve, so that its manual holds. A server without Ray has one engine for each model, and
takes no notice of them.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from dragoman.core.types import Count, Seconds, Word

AtLeastNone = Annotated[float, msgspec.Meta(ge=0)]


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replicas: Count | None = None
    """As many, always; None: as many as the load asks for."""
    min_replicas: Annotated[int, msgspec.Meta(ge=0)] = 1
    max_replicas: Count = 1
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """For each replica; where there are more, others are started."""
    upscale_delay_s: AtLeastNone = 10.0
    downscale_delay_s: AtLeastNone = 300.0
    look_back_period_s: Seconds = 30.0
    """The load is the mean of so long,"""
    metrics_interval_s: Seconds = 10.0
    """told by whoever has requests so often."""
    max_ongoing_requests: Count | None = None
    """That a replica takes at once; None: as many as the model's `slots` say, or 16."""
    num_cpus: AtLeastNone = 1.0
    num_gpus: AtLeastNone = 0.0
    resources: Mapping[Word, AtLeastNone] = {}
    graceful_shutdown_timeout_s: Seconds = 600.0
    """For what still runs in a replica that is taken away."""

    def __post_init__(self) -> None:
        if self.replicas is not None and (self.min_replicas, self.max_replicas) != (1, 1):
            raise ValueError("replicas is for a fixed number; without it there are min_replicas and max_replicas")
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is more than max_replicas ({self.max_replicas})")

    @property
    def most(self) -> int:
        return self.replicas or self.max_replicas
