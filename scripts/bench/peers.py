"""Other engines on the same model, for benches that time them in the same run.

Each system has `prefill` and `decode`, timed in the same way; a peer that is not installed is left
out. This module is not a command.
"""

import ctypes
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxkv.engine import Engine, EngineConfig, Request
from jaxkv.models.decode_model import FlaxDecodeModel


class System(Protocol):
    """An engine that is timed, in seconds of wall time."""

    name: str

    def prefill(self, tokens: list[int]) -> float:
        """Computes a prompt and its next token; returns the seconds it took."""
        ...

    def decode(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """Decodes a batch after its prompts are computed; returns the seconds of each step."""
        ...


class Jaxkv:
    """jaxkv's engine, including its host side."""

    name = "jaxkv"

    def __init__(self, model: FlaxDecodeModel):
        self._model = model
        self._engines: dict[tuple[int, int], Engine] = {}

    def prefill(self, tokens: list[int]) -> float:
        engine = self._engine(1, len(tokens) + 1)
        engine.submit(Request(prompt=tuple(tokens), max_new_tokens=1))
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        # The first sequences already decode while the last prompts are computed.
        new_tokens = num_steps + len(prompts) + 1
        engine = self._engine(len(prompts), len(prompts[0]) + new_tokens)
        requests = [Request(prompt=tuple(p), max_new_tokens=new_tokens) for p in prompts]
        running = [engine.submit(request) for request in requests]
        while any(not completion.tokens for completion in running):
            engine.step()
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        for completion in running:
            engine.abort(completion.request_id)
        return seconds

    def _engine(self, batch: int, length: int) -> Engine:
        """Returns an engine for sequences of up to a power of two tokens."""
        key = (batch, 1 << (length - 1).bit_length())
        if key not in self._engines:
            config = EngineConfig(
                max_sequences=batch, pool_tokens=batch * key[1], prefix_cache=False
            )
            self._engines[key] = Engine(self._model, config)
        return self._engines[key]


class LlamaCpp:
    """llama.cpp through the C API of `llama_cpp`, with float32 K and V."""

    name = "llama.cpp"

    def __init__(self, gguf_path: Path, num_threads: int):
        self._lib: Any = importlib.import_module("llama_cpp")
        lib = self._lib
        self._quiet = lib.llama_log_callback(
            lambda *_: None
        )  # kept alive, because C holds a pointer to it
        lib.llama_backend_init()
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(str(gguf_path).encode(), params)
        self._num_threads = num_threads

    def prefill(self, tokens: list[int]) -> float:
        with self._context(len(tokens) + 1, 1) as context:
            return self._decode_batch(context, [(token, i, 0) for i, token in enumerate(tokens)])

    def decode(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        longest = max(map(len, prompts)) + num_steps + 1
        with self._context(len(prompts) * longest, len(prompts)) as context:
            for s, prompt in enumerate(prompts):
                self._decode_batch(context, [(t, i, s) for i, t in enumerate(prompt)])
            return [
                self._decode_batch(context, [(p[-1], len(p) + i, s) for s, p in enumerate(prompts)])
                for i in range(num_steps)
            ]

    @contextmanager
    def _context(self, num_tokens: int, num_sequences: int) -> Iterator[Any]:
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_tokens, num_sequences
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = self._num_threads
        params.type_k = params.type_v = 0  # GGML_TYPE_F32
        params.kv_unified = True
        context = lib.llama_init_from_model(self._model, params)
        try:
            yield context
        finally:
            lib.llama_free(context)

    def _decode_batch(self, context: Any, items: list[tuple[int, int, int]]) -> float:
        """Runs a batch of (token, position, sequence), with logits for each sequence's last."""
        lib = self._lib
        batch = lib.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        last = {sequence: i for i, (_, _, sequence) in enumerate(items)}
        for i, (token, position, sequence) in enumerate(items):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = last[sequence] == i
        start = time.perf_counter()
        code = lib.llama_decode(context, batch)
        lib.llama_synchronize(context)
        seconds = time.perf_counter() - start
        lib.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")
        return seconds


class Transformers:
    """Hugging Face transformers on torch, float32, sdpa attention."""

    name = "transformers"

    def __init__(self, gguf_path: Path, num_threads: int):
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(num_threads)
        auto_model = importlib.import_module("transformers").AutoModelForCausalLM
        self._model = auto_model.from_pretrained(
            str(gguf_path.parent), gguf_file=gguf_path.name, dtype=self._torch.float32
        ).eval()

    def prefill(self, tokens: list[int]) -> float:
        return self._forward([tokens], None)[0]

    def decode(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        _, cache = self._forward(prompts, None)
        seconds = []
        for _ in range(num_steps):
            step, cache = self._forward([[prompt[-1]] for prompt in prompts], cache)
            seconds.append(step)
        return seconds

    def _forward(self, rows: list[list[int]], cache: Any) -> tuple[float, Any]:
        torch = self._torch
        ids = torch.tensor(rows)
        with torch.inference_mode():
            start = time.perf_counter()
            result = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - start, result.past_key_values


def installed_peers(gguf_path: Path, num_threads: int) -> list[System]:
    """Returns the peers that can be imported, loaded with the weights of a GGUF file."""
    makers: dict[str, Callable[[Path, int], System]] = {
        "llama_cpp": LlamaCpp,
        "transformers": Transformers,
    }
    return [
        make(gguf_path, num_threads)
        for module, make in makers.items()
        if importlib.util.find_spec(module) is not None
    ]


def write_float32_gguf(source: Path, target: Path) -> None:
    """Writes a GGUF file with all tensors as float32, so that peers compute what jaxkv does."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    skipped = ("GGUF.", "general.architecture", "general.file_type")
    for name, entry in reader.fields.items():
        if name.startswith(skipped):
            continue
        if entry.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, entry.contents())
        else:
            writer.add_key_value(name, entry.contents(), entry.types[0])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
