"""The engine process: `python -m vllm.core FD STEPS_PER_SECOND MAX_RUNNING CONTEXT`.

The model echoes the last user message. For "count N" it returns the numbers below N, for "what grammar" the grammar of
the reply, for "what adapter" the adapter's name. The embedding of "not a number" contains NaN. Requests with the same
salt and adapter share cached prefixes.
"""

import math
import re
import select
import socket
import struct
import sys
import time

import msgspec

from .tokenizer import IM_END
from .values import (
    Abort,
    Add,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)

HEADER = struct.Struct("<I")
BLOCK = 16
WIDTH = 16


def create_reply(request: EngineCoreRequest) -> list[int]:
    prompt, params = request.prompt_token_ids, request.sampling_params
    text = b"".join(bytes([token]) if token < 256 else b"\x00" for token in prompt)
    users = re.findall(rb"\x00user\n(.*?)\x00", text, re.DOTALL)
    text = users[-1] if users else text
    counting = re.match(rb"count (\d+)", text)
    if counting:
        text = b" ".join(str(number).encode() for number in range(int(counting[1])))
    elif text == b"what grammar":
        shape = None if params is None else params.structured_outputs
        text = str(None if shape is None else shape.grammar).encode()
    elif text == b"what priority":
        text = str(request.priority).encode()
    elif text == b"what adapter":
        text = str(None if request.lora_request is None else request.lora_request.lora_name).encode()
    return [*text, IM_END]


class Running:
    def __init__(self, request: EngineCoreRequest, cached: int) -> None:
        self.request = request
        self.left = iter(create_reply(request))
        self.made = 0
        self.cached = cached

    def step(self, context: int) -> EngineCoreOutput:
        params = self.request.sampling_params
        if params is None:
            return self._vector()
        token = next(self.left, IM_END)
        if params.ignore_eos and token == IM_END:
            token = ord("x")
        self.made += 1
        reason = None
        if token == IM_END or token in params.stop_token_ids:
            reason = FinishReason.STOP
        elif self.made >= params.max_tokens or len(self.request.prompt_token_ids) + self.made >= context:
            reason = FinishReason.LENGTH
        first = self.made == 1
        return EngineCoreOutput(
            self.request.request_id,
            [token],
            new_logprobs=None if params.logprobs is None else self._logprobs(token, params.logprobs),
            new_prompt_logprobs_tensors=self._prompt_logprobs(params.prompt_logprobs) if first else None,
            finish_reason=reason,
            prefill_stats=PrefillStats(self.cached) if first else None,
        )

    def _vector(self) -> EngineCoreOutput:
        counts = [float(self.request.prompt_token_ids.count(ord("a") + at)) + 0.5 for at in range(WIDTH)]
        if bytes(self.request.prompt_token_ids) == b"not a number":
            counts[0] = math.nan
        return EngineCoreOutput(self.request.request_id, [], pooling_output=counts, finish_reason=FinishReason.STOP)

    def _logprobs(self, token: int, top: int) -> tuple[list[list[int]], list[list[float]]]:
        tokens = [token, *range(65, 65 + top)]
        return [tokens], [[-0.25 * at for at in range(len(tokens))]]

    def _prompt_logprobs(self, top: int | None) -> tuple[list[list[int]], list[list[float]]] | None:
        if top is None:
            return None
        tokens = self.request.prompt_token_ids[1:]
        return [[token, *range(65, 65 + top)] for token in tokens], [[-0.5] * (top + 1) for _ in tokens]


class Core:
    def __init__(self, pipe: socket.socket, pace: float, max_running: int, context: int) -> None:
        self.pipe, self.pace, self.max_running, self.context = pipe, pace, max_running, context
        self.waiting: dict[str, EngineCoreRequest] = {}
        self.running: dict[str, Running] = {}
        self.seen: dict[object, list[int]] = {}
        self.decoder = msgspec.msgpack.Decoder(Add | Abort)
        self.buffer = b""

    def run(self) -> None:
        due = time.monotonic()
        while self.receive(max(0.0, due - time.monotonic()) if self.running or self.waiting else None):
            now = time.monotonic()
            if now < due:
                continue
            due = max(due + self.pace, now - self.pace)
            self.admit()
            outputs = [running.step(self.context) for running in self.running.values()]
            for output in outputs:
                if output.finish_reason is not None:
                    del self.running[output.request_id]
            self.send(EngineCoreOutputs(outputs, SchedulerStats(len(self.running) / self.max_running)))

    def admit(self) -> None:
        for key, request in list(self.waiting.items())[: self.max_running - len(self.running)]:
            del self.waiting[key]
            prompt, lora = request.prompt_token_ids, request.lora_request
            group = request.cache_salt, None if lora is None else lora.lora_int_id
            seen = self.seen.get(group, [])
            same = next((at for at, (a, b) in enumerate(zip(prompt, seen, strict=False)) if a != b), len(seen))
            cached = min(same, len(prompt) - 1) // BLOCK * BLOCK
            self.running[key] = Running(request, cached)
            self.seen[group] = prompt

    def receive(self, seconds: float | None) -> bool:
        """Read messages until a step is due; return whether the client is still connected."""
        if not select.select([self.pipe], [], [], seconds)[0]:
            return True
        data = self.pipe.recv(1 << 20)
        self.buffer += data
        while len(self.buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self.buffer)
            if len(self.buffer) < HEADER.size + length:
                break
            self.handle(self.decoder.decode(self.buffer[HEADER.size : HEADER.size + length]))
            self.buffer = self.buffer[HEADER.size + length :]
        return bool(data)

    def handle(self, message: Add | Abort) -> None:
        if isinstance(message, Add):
            self.waiting[message.request.request_id] = message.request
            return
        for key in message.request_ids:
            self.waiting.pop(key, None)
            self.running.pop(key, None)

    def send(self, outputs: EngineCoreOutputs) -> None:
        body = msgspec.msgpack.encode(outputs)
        self.pipe.sendall(HEADER.pack(len(body)) + body)


if __name__ == "__main__":
    fd, rate, max_running, context = sys.argv[1:]
    Core(socket.socket(fileno=int(fd)), 1 / float(rate), int(max_running), int(context)).run()
