"""OpenAI's list of models, with what else is known of each: context, device, state."""

from collections.abc import Sequence
from typing import Any

import msgspec


class ListedModel(msgspec.Struct, frozen=True):
    name: str
    created: int
    owner: str
    context: int | None
    device: str | None
    state: str


def encode_model(model: ListedModel) -> dict[str, Any]:
    listed = {"id": model.name, "object": "model", "created": model.created, "owned_by": model.owner}
    known = {"max_model_len": model.context, "device": model.device, "state": model.state}
    return listed | {key: value for key, value in known.items() if value is not None}


def encode_models(models: Sequence[ListedModel]) -> dict[str, Any]:
    return {"object": "list", "data": [encode_model(model) for model in models]}
