"""The engine that runs models in vLLM's asynchronous engine. Prompts go in as tokens; each step returns new tokens.

If vLLM's engine process dies before the engine is ready, the start fails. `loaded_model` handles its later death.
"""

import asyncio
import gc
import logging
import os
import re
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import ModelInfo
from dragoman.core.errors import ConfigError, EngineFailed, NotSupported
from dragoman.core.events import Listener
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest
from dragoman.engines.prompt_reader import CONSTRAINT_FEATURES, EMBEDDING_FEATURES, TOKEN_FEATURES
from dragoman.engines.token_engine import TokenEngine
from dragoman.engines.vllm import vllm_api as vllm
from dragoman.engines.vllm.generation import PendingEmbedding
from dragoman.engines.vllm.loaded_model import LoadedModel
from dragoman.engines.vllm.options import (
    VllmOptions,
    adapter_directories,
    build_engine_args,
    check_arg_names,
    describe_error,
    find_errors,
    last_line,
)
from dragoman.engines.vllm.request_builder import VllmRequestBuilder, build_embedding_requests
from dragoman.engines.vllm.vocabulary import HfVocabulary

log = logging.getLogger("dragoman.engine")

MAX_PROMPT_THREADS = 4
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
"""A temporary failure: a later start may succeed."""


class VllmEngine(TokenEngine):
    Options = VllmOptions
    loads_directory = True
    device = "auto"
    """Chosen by vLLM when the model is loaded."""

    def __init__(self, name: str, options: VllmOptions) -> None:
        # Tokenizing releases the GIL but rendering does not, so more threads would only wait for it.
        threads = max(2, min(MAX_PROMPT_THREADS, os.cpu_count() or 1))
        super().__init__(prompt_threads=threads, threads_per_principal=threads)
        self.name = name
        self.options = options
        self.slots = options.slots
        self._model: LoadedModel | None = None
        self._builder: VllmRequestBuilder | None = None
        """Builds the requests of a model that generates text."""

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, VllmOptions)
        return cls(name, options)

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True

    @classmethod
    def find_option_errors(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, VllmOptions)
        missing = [] if vllm.is_installed() else [("engine", vllm.NOT_INSTALLED)]
        return [*missing, *find_errors(options)]

    @classmethod
    def is_installed(cls) -> bool:
        return vllm.is_installed()

    def models(self) -> Sequence[ModelInfo]:
        context = self.options.context if self._model is None else self._model.context
        syntax = self.options.format or "plain" if self._builder is None else self._builder.format.name
        return [ModelInfo(name, context=context, format=syntax) for name in (self.name, *self.options.adapters)]

    def supports(self) -> frozenset[str]:
        if self._model is None:
            return TOKEN_FEATURES | CONSTRAINT_FEATURES
        if self._builder is None:
            return EMBEDDING_FEATURES
        vocabulary = self._model.vocabulary
        constraints = frozenset() if vocabulary.kind is None else CONSTRAINT_FEATURES
        infill = frozenset() if vocabulary.infill is None else {Feature.INFILL}
        return TOKEN_FEATURES | constraints | infill

    async def start(self) -> None:
        api, llm, vocabulary = await asyncio.to_thread(_load, self.options)
        self.device = api.device
        self._model = model = LoadedModel(self, api, llm, vocabulary)
        await model.run_unless_dead(self._prepare(model))
        # Exempt the loaded objects from garbage collection, which would pause all streams.
        gc.collect()
        gc.freeze()
        log.info("model %s: vllm %s on %s, context %s", self.name, api.version, self.device, model.context)

    async def _prepare(self, model: LoadedModel) -> None:
        model.tasks = tuple(await model.llm.engine_core.get_supported_tasks_async())
        if model.llm.model_config.runner_type != "pooling":
            loras = await self._load_adapters(model)
            self._builder = await asyncio.to_thread(VllmRequestBuilder, model, self.options, loras)
        elif "embed" not in model.tasks:
            message = f"{self.options.path} does not support embeddings, only: {', '.join(model.tasks)}"
            raise ConfigError(f"vllm: {message}")

    async def _load_adapters(self, model: LoadedModel) -> dict[str, Any]:
        core, loras = model.llm.engine_core, {}
        for number, (name, directory) in enumerate(adapter_directories(self.options).items(), 1):
            lora = model.api.lora(lora_name=name, lora_int_id=number, lora_path=str(directory))
            try:
                await core.add_lora_async(lora)
            except Exception as error:
                message = f"adapter {name} cannot be loaded: {last_line(error)}"
                # Errors of the engine process arrive as text, without their class.
                if core.resources.engine_dead or OUT_OF_MEMORY.search(str(error)):
                    raise EngineFailed(message) from error
                raise ConfigError(f"vllm: {message}") from error
            loras[name] = lora
        return loras

    async def stop(self) -> None:
        if self._model is not None:
            await self._model.close()
        if self._builder is not None and self._builder.constraints is not None:
            await self._builder.constraints.close()
        self.close_pools(wait=False)

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        model = self._require_model()
        generation = await self.build_generation(self.require_builder(), request)
        try:
            await model.submit(generation)
            await generation.events.deliver(listener)
        finally:
            model.drop(generation)
        await self.deliver_checked(generation, listener)

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        model = self._require_model()
        if self._builder is not None:
            raise NotSupported("this model generates text; embeddings need a model with `args: {runner: pooling}`")
        requests = await self.run_in_pool(build_embedding_requests, model, inputs)
        loop = asyncio.get_running_loop()
        entries = [PendingEmbedding(request, loop.create_future()) for request in requests]
        try:
            for entry in entries:
                await model.submit(entry)
            return await asyncio.gather(*(entry.future for entry in entries))
        finally:
            for entry in entries:
                model.drop(entry)

    def _require_model(self) -> LoadedModel:
        if self._model is None or not self._model.is_running:
            raise EngineFailed("the engine is not running")
        return self._model

    def require_vocabulary(self) -> HfVocabulary:
        return self._require_model().vocabulary

    def require_builder(self) -> VllmRequestBuilder:
        self._require_model()
        if self._builder is None:
            raise NotSupported("this model supports only embeddings")
        return self._builder


def _load(options: VllmOptions) -> tuple[vllm.VllmApi, Any, HfVocabulary]:
    errors = [f"{key}: {message}" for key, message in find_errors(options)]
    if errors:
        raise ConfigError(f"vllm: {'; '.join(errors)}")
    api = vllm.import_vllm()
    check_arg_names(options, api.arg_names)
    try:
        args = api.engine_args(**build_engine_args(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vllm: {describe_error(error, options)}") from error
    try:
        llm = api.load(args)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"vllm: {options.path}: {describe_error(error, options)}") from error
    except RuntimeError as error:
        # vLLM's processes print why they did not start; the error only says that they did not.
        log.error("vLLM could not be loaded", exc_info=error)
        message = f"vllm: {options.path}: {last_line(error)} (the server's log has the output of vLLM's processes)"
        raise ConfigError(message) from error
    config = llm.model_config
    try:
        return api, llm, HfVocabulary(llm.tokenizer, config.get_vocab_size(), vllm.end_tokens(config))
    except (AttributeError, msgspec.MsgspecError) as error:
        llm.shutdown()
        reason = f"its tokenizer is not a fast Hugging Face tokenizer ({describe_error(error, options)})"
        raise ConfigError(f"vllm: {options.path} cannot be used: {reason}") from error
