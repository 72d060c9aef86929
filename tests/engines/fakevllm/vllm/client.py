"""The client of the engine process, and AsyncLLM."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from .core import HEADER
from .tokenizer import Tokenizer
from .values import (
    VOCABULARY,
    Abort,
    Add,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    UsageContext,
    ValidationError,
    VLLMValidationError,
)

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

FAILING = {"starved": "(EngineCore pid=7) ERROR ValueError: No available memory for the cache blocks.\n"}
"""Output of the processes of models that fail to start."""


@dataclass
class AsyncEngineArgs:
    model: str
    max_model_len: int = 4096
    max_num_seqs: int = 1024
    runner: str = "generate"
    disable_log_stats: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    scheduling_policy: str = "fcfs"
    steps_per_second: float = 500
    """Only in the fake."""
    dies_in: str = ""
    """Only in the fake: the call that kills the process, `tasks`, `loras` or `settings`."""

    def __post_init__(self) -> None:
        if self.max_lora_rank not in LORA_RANKS:
            raise ValueError(f"max_lora_rank ({self.max_lora_rank}) must be one of {LORA_RANKS}.")


class ModelConfig:
    def __init__(self, args: AsyncEngineArgs, core: "AsyncMPClient") -> None:
        self.args = args
        self.core = core
        self.max_model_len = args.max_model_len
        self.runner_type = args.runner

    def get_vocab_size(self) -> int:
        return VOCABULARY

    def get_diff_sampling_param(self) -> dict[str, Any]:
        if self.args.dies_in == "settings":
            self.core.process.kill()
            time.sleep(1)
        return {"temperature": 0.5}

    def try_get_generation_config(self) -> dict[str, Any]:
        return {"eos_token_id": [257]}


class InputProcessor:
    def __init__(self, args: AsyncEngineArgs) -> None:
        self.args = args

    def process_inputs(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        supported_tasks: tuple[str, ...],
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> EngineCoreRequest:
        tokens = prompt["prompt_token_ids"]
        if max(tokens) >= VOCABULARY:
            raise VLLMValidationError(f"Token id {max(tokens)} is out of vocabulary")
        if isinstance(params, PoolingParams):
            return EngineCoreRequest(request_id, tokens, pooling_params=params)
        if lora_request is not None and not self.args.enable_lora:
            raise ValueError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        params.verify()
        rest = {"lora_request": lora_request, "cache_salt": prompt["cache_salt"], "priority": priority}
        return EngineCoreRequest(request_id, tokens, params, **rest)


class AsyncMPClient:
    def __init__(self, args: AsyncEngineArgs) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "vllm.core", str(theirs.fileno())]
        command += [str(args.steps_per_second), str(args.max_num_seqs), str(args.max_model_len)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.pipe = ours
        self.args = args
        self.resources = SimpleNamespace(engine_dead=False)
        self.queue: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.times: Counter[bytes] = Counter()
        self.loras: set[int] = set()

    async def get_output_async(self) -> EngineCoreOutputs:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            threading.Thread(target=self._read, args=(self.loop,), daemon=True).start()
        outputs = await self.queue.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        file = self.pipe.makefile("rb")
        try:
            while header := file.read(HEADER.size):
                (length,) = HEADER.unpack(header)
                loop.call_soon_threadsafe(self.queue.put_nowait, decoder.decode(file.read(length)))
        except (OSError, ValueError, msgspec.DecodeError):
            pass
        self.resources.engine_dead = True
        try:
            loop.call_soon_threadsafe(self.queue.put_nowait, EngineDeadError("EngineCore encountered an issue."))
        except RuntimeError:
            # The loop is closed.
            pass

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Reject a prompt that contains "at most N times" after N times."""
        most = re.search(rb"at most (\d) times", bytes(token for token in request.prompt_token_ids if token < 256))
        if most is not None:
            self.times[most[0]] += 1
            if self.times[most[0]] > int(most[1]):
                raise ValueError("too many requests")
        self._send(Add(request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self._send(Abort(request_ids))

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        await self._survive("loras")
        if lora_request.lora_name == "large":
            raise Exception("Call to add_lora method failed: CUDA out of memory. Tried to allocate 2.00 GiB.")
        if lora_request.lora_name == "odd":
            raise Exception("Call to add_lora method failed: expected target modules in {'q_proj'}")
        rank = json.loads((Path(lora_request.lora_path) / "adapter_config.json").read_text())["r"]
        self.loras.add(lora_request.lora_int_id)
        if not self.args.enable_lora or len(self.loras) > self.args.max_loras:
            raise RuntimeError("max_loras exceeded")
        if rank > self.args.max_lora_rank:
            raise ValueError(f"LoRA rank {rank} is greater than max_lora_rank {self.args.max_lora_rank}.")
        return True

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        await self._survive("tasks")
        return ("embed",) if self.args.runner == "pooling" else ("generate",)

    async def _survive(self, what: str) -> None:
        """A dead process never answers."""
        if self.args.dies_in == what:
            self.process.kill()
            await asyncio.Event().wait()

    def _send(self, message: Add | Abort) -> None:
        body = msgspec.msgpack.encode(message)
        self.pipe.sendall(HEADER.pack(len(body)) + body)

    def shutdown(self) -> None:
        self.pipe.shutdown(socket.SHUT_RDWR)
        self.process.kill()
        self.process.wait()


class AsyncLLM:
    def __init__(self, args: AsyncEngineArgs) -> None:
        self.engine_core = AsyncMPClient(args)
        self.model_config = ModelConfig(args, self.engine_core)
        self.tokenizer = Tokenizer()
        self.input_processor = InputProcessor(args)
        self.output_handler: Any = None

    @classmethod
    def from_engine_args(
        cls, args: AsyncEngineArgs, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT
    ) -> "AsyncLLM":
        if usage_context is not UsageContext.OPENAI_API_SERVER:
            raise ValueError("usage_context must be OPENAI_API_SERVER")
        if args.model == "broken":
            raise ValueError("no such model")
        if args.max_num_seqs < 1:
            message, given = "Input should be greater than or equal to 1", args.max_num_seqs
            fields = ("max_num_batched_tokens", "max_num_seqs")
            raise ValidationError(*(((field,), message, given) for field in fields))
        if args.model in FAILING:
            subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])", FAILING[args.model]])
            raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        return cls(args)

    def shutdown(self) -> None:
        self.engine_core.shutdown()
