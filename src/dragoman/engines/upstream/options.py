"""What a configuration may say of a model that other servers run."""

import os
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from dragoman.client.planner import ProtocolName
from dragoman.core.errors import ConfigError
from dragoman.core.types import Seconds, Word
from dragoman.core.urls import DEFAULT, public, site


class PlaceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server; what it does not say is as the model says it."""

    url: Word
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Those of a higher rank are asked only when nobody of a lower one can be."""
    key_env: Word | None = None
    protocol: ProtocolName | None = None
    model: Word | None = None


class UpstreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: Word | None = None
    urls: tuple[Word | PlaceOptions, ...] = ()
    protocol: ProtocolName = "auto"
    key_env: Word | None = None
    """The environment variable that has the key."""
    model: Word | None = None
    """What the model is called over there; else as it is here."""
    models: Literal["all"] | None = None
    """All models of the server, each below the name of this one."""
    format: str | None = None
    """The syntax of thoughts and calls, where the server gives only text."""
    context: Annotated[int, msgspec.Meta(ge=1)] | None = None
    slots: Annotated[int, msgspec.Meta(ge=1)] | None = None
    image_urls: bool = False
    """Whether addresses of images are passed on, for the server to fetch."""
    proxy: Word | None = None
    connect_seconds: Seconds = 10.0
    silence_seconds: Seconds = 600.0
    health_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Between two looks at each server; 0: none."""

    def __post_init__(self) -> None:
        """What is wrong is told with the line of the file that it stands in."""
        if not self.given:
            raise ValueError("url is missing: the address of the server, or urls for several")
        if self.url and self.urls:
            raise ValueError("url is the address of one server, and urls are those of several; give one of the two")
        if self.models is not None and self.model is not None:
            raise ValueError("model names one model, and models means all of them; give one of the two")
        wrong = [words for place in self.given for words in _mistakes(place.url)]
        wrong += [f"proxy: {words}" for words in _mistakes(self.proxy or DEFAULT)]
        if wrong:
            raise ValueError("; ".join(wrong))
        addresses = [site(place.url).api for place in self.given]
        if len(set(addresses)) < len(addresses):
            raise ValueError("an address is given twice; use weight to send more to one of them")

    @property
    def given(self) -> list[PlaceOptions]:
        every = [*([self.url] if self.url else []), *self.urls]
        return [PlaceOptions(entry) if isinstance(entry, str) else entry for entry in every]

    @property
    def places(self) -> list[PlaceOptions]:
        """Each with all that holds for it."""
        return [
            msgspec.structs.replace(
                place,
                key_env=place.key_env or self.key_env,
                protocol=place.protocol or self.protocol,
                model=place.model or self.model,
            )
            for place in self.given
        ]


def _mistakes(url: str) -> Sequence[str]:
    try:
        site(url)
    except ConfigError as error:
        return error.mistakes
    return ()


def key_of(name: str, place: PlaceOptions) -> str | None:
    if place.key_env is None:
        return None
    key = os.environ.get(place.key_env, "").strip()
    if not key:
        raise ConfigError(f"models.{name}: the environment variable {place.key_env} has no key for {public(place.url)}")
    return key
