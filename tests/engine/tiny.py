"""A decoder of a few thousand random weights, and an engine that checks itself at every step."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from flax import nnx

from jaxkv.cache import KVCache
from jaxkv.cache.debug import check_tables
from jaxkv.engine import Completion, Delta, Engine, EngineConfig, Request
from jaxkv.engine.shapes import StepShape
from jaxkv.engine.step import StepChoices, StepFunctions
from jaxkv.engine.stopping import DetokenizerFactory
from jaxkv.models.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from jaxkv.models.decode_model import FlaxDecodeModel
from jaxkv.models.decoder import Decoder
from jaxkv.prefix import check_integrity
from tests.models.numpy_decoder import decode_naively

V = 97
MAX_POSITIONS = 256

# Two layer groups, GQA of two, and a window that most prompts of the tests exceed.
TINY = ModelConfig(
    family="llama",
    vocab_size=V,
    width=32,
    mlp_width=48,
    layers=tuple(LayerConfig(window=window, rope=RopeConfig(theta=100.0)) for window in (12, None)),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.35),
    max_positions=MAX_POSITIONS,
    rms_eps=1e-5,
    tied_embeddings=False,
)


def decode_model(decoder: Decoder) -> FlaxDecodeModel:
    """Wraps a decoder for the engine."""
    graphdef, state = nnx.split(decoder)
    named = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
    return FlaxDecodeModel.from_named(decoder.config, graphdef, named)


@dataclass
class Tiny:
    """One decoder, its compiled functions, and its answers without an engine."""

    decoder: Decoder
    functions: dict[bool, StepFunctions] = field(default_factory=dict)
    naive: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    @classmethod
    def random(cls) -> "Tiny":
        """The decoder of TINY."""
        return cls(Decoder(TINY, rngs=nnx.Rngs(0)))

    @cached_property
    def model(self) -> FlaxDecodeModel:
        return decode_model(self.decoder)

    def engine(
        self, *, detokenizer: DetokenizerFactory | None = None, **config: object
    ) -> "CheckedEngine":
        """An engine that shares its compiled functions with all others of this decoder."""
        options = EngineConfig(**{"pool_tokens": 2048, "token_budget": 64, **config})
        deterministic = options.deterministic
        if deterministic not in self.functions:
            choices = StepChoices(deterministic=deterministic)
            self.functions[deterministic] = StepFunctions(self.model, choices)
        return CheckedEngine(self.model, options, self.functions[deterministic], detokenizer)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """`[S, V]` float64, computed from scratch."""
        key = tuple(tokens)
        if key not in self.naive:
            self.naive[key] = decode_naively(self.decoder, list(tokens))
        return self.naive[key]

    def greedy(self, prompt: tuple[int, ...], n: int) -> list[int]:
        """The n most likely next tokens, each after a recompute of all that came before."""
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


class CheckedEngine(Engine):
    """An engine that checks pools, tables, budget and cache around every step."""

    def __init__(
        self,
        model: FlaxDecodeModel,
        config: EngineConfig,
        functions: StepFunctions,
        detokenizer: DetokenizerFactory | None,
    ):
        checked = CheckedFunctions(functions)
        super().__init__(model, config, detokenizer=detokenizer, steps=checked)
        checked.engine = self
        self._taken: list[list[int]] = [[] for _ in self.pools]

    def squeeze(self, tokens: int) -> "CheckedEngine":
        """Takes pages away until `tokens` tokens are left: a small pool, and nothing recompiled."""
        for pool, taken in zip(self.pools, self._taken, strict=True):
            taken += pool.acquire(max(0, pool.num_free - tokens // self.spec.page_size))
        return self

    def step(self) -> list[Delta]:
        deltas = super().step()
        if self.index is not None:
            pinned = self.pins.holdings() if self.pins is not None else []
            snapshots = self._dropper.snapshots
            check_integrity(self.index, self._tables, [self._taken, *pinned], snapshots)
        for pool in self.pools:
            pool.check_integrity()
        assert self.cache.spec == self.spec
        if not self.has_work:
            assert self.held_pages == [0] * len(self.pools)
            assert self._tables.num_open == 0
        return deltas

    @property
    def held_pages(self) -> list[int]:
        """Pages that sequences hold, in each layer group; a pinned page counts for its pin."""
        pinned = [self.pins.num_pinned(g) if self.pins else 0 for g in range(len(self.pools))]
        others = [len(ids) + n for ids, n in zip(self._taken, pinned, strict=True)]
        return [pool.num_held - n for pool, n in zip(self.pools, others, strict=True)]

    @property
    def cache(self) -> KVCache:
        return self._runner.cache


class CheckedFunctions(StepFunctions):
    """Compiled functions, shared with others, that check all that is handed to them."""

    engine: CheckedEngine

    def __init__(self, functions: StepFunctions):
        vars(self).update(vars(functions))
        self.shapes: set[StepShape] = set()
        self.prompt_logprobs_calls = 0

    def run(self, cache, buffer, seen, layout):
        self.shapes.add(layout.shape)
        arrays = layout.split(buffer)
        query_lens = np.diff(arrays.query_starts)
        assert 0 < query_lens.sum() <= self.engine.config.token_budget
        assert (query_lens > 0).sum() <= self.engine.config.max_sequences
        check_tables(
            tuple(arrays.page_tables),
            arrays.kv_lens,
            query_lens,
            self.engine.pools,
            self.engine.spec,
        )
        result, new_cache = super().run(cache, buffer, seen, layout)
        assert all(x.is_deleted() for pages in cache.layers for x in pages.paged.values())
        return result, new_cache

    def copy(self, cache, copies, max_copies):
        for group, pool in enumerate(self.engine.pools):
            targets = [copy.target for copy in copies if copy.group == group]
            assert len(set(targets)) == len(targets)
            assert all(pool.state(page) == (0, 1) for page in targets)
        return super().copy(cache, copies, max_copies)

    def prompt_logprobs(self, hidden, targets):
        self.prompt_logprobs_calls += 1
        return super().prompt_logprobs(hidden, targets)


class BytesDetokenizer:
    """Token i is a letter or a byte of a two-byte character; half a character is held back."""

    def __init__(self):
        self._held = b""

    @staticmethod
    def piece(token: int) -> bytes:
        if token >= 80:  # the two bytes of "é"
            return (b"\xc3", b"\xa9")[token % 2]
        return bytes([97 + token % 5]) + (b"b" if token % 3 == 0 else b"")

    def push(self, ids: list[int]) -> str:
        self._held += b"".join(map(self.piece, ids))
        end = len(self._held) - self._held.endswith(b"\xc3")
        text, self._held = self._held[:end], self._held[end:]
        return text.decode(errors="replace")

    def flush(self) -> str:
        text, self._held = self._held, b""
        return text.decode(errors="replace")

    @classmethod
    def text(cls, ids: list[int]) -> str:
        """Returns the text of the whole answer."""
        return b"".join(map(cls.piece, ids)).decode(errors="replace")


def random_prompts(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, V, n).tolist()) for n in lengths]


def run(engine: Engine, request: Request) -> Completion:
    """Serves only this request."""
    (completion,) = engine.generate([request])
    return completion
