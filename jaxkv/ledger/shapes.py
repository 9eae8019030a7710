"""What a transformer decoder keeps and computes, layer by layer, as numbers only.

The *mixer* of a layer is the part with which a token sees other tokens:

    Heads    K and V per KV head (MHA, GQA, MQA), of all tokens, a window or a chunk
    Latent   one vector per token for all heads, from which K and V are made (MLA, arXiv 2405.04434)
    Shared   nothing of its own: it reads the K and V of an earlier layer
    State    a state of constant size: linear attention

`config_json` makes a model from a `config.json`, and `memory` counts its bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxkv.ledger.errors import LedgerError, check_least


@dataclass(frozen=True, kw_only=True)
class Span:
    """Which earlier tokens a token sees: all, if both attributes are None.

    Attributes:
      window: number of last tokens that it sees, itself included.
      chunk: tokens per chunk; chunks are counted from the beginning of the sequence, and a token
        sees those of its own chunk.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that are seen; None if that number grows with the sequence."""
        return self.chunk if self.window is None else self.window

    def seen(self, position: int) -> int:
        """Returns how many tokens the token at a position sees, itself included."""
        if self.window is not None:
            return min(position + 1, self.window)
        return position % self.chunk + 1 if self.chunk is not None else position + 1


ALL = Span()


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention with K and V of its own.

    Attributes:
      query_heads: H.
      kv_heads: K.
      key_dim: D of a key.
      value_dim: D of a value.
      span: which tokens a token sees.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    span: Span = ALL

    @property
    def pair_macs(self) -> int:
        """Multiply-adds of one query token and one key token: the score, and the sum of values."""
        return self.query_heads * (self.key_dim + self.value_dim)

    decode_pair_macs = pair_macs

    def kv_heads_of(self, devices: int) -> int:
        """Returns the number of KV heads on each device; one head may be on several devices.

        Raises:
          LedgerError: the heads do not split evenly.
        """
        if self.kv_heads % devices == 0:
            return self.kv_heads // devices
        if devices % self.kv_heads:
            raise LedgerError(f"{self.kv_heads} KV heads do not split over {devices} devices")
        return 1


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention. Each device of a tensor-parallel split has the whole latent.

    Attributes:
      query_heads: H.
      rank: size of the vector from which K and V are made.
      rope_dim: size of the part of a key that all heads share.
      nope_dim: size of the part of a key that each head has.
      value_dim: D of a value.
      span: which tokens a token sees.
    """

    query_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    span: Span = ALL

    @property
    def pair_macs(self) -> int:
        """Multiply-adds of a query and a key token in a prefill, where K and V are made first."""
        return self.query_heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @property
    def decode_pair_macs(self) -> int:
        """The same in a decode step, which works on the latents themselves."""
        return self.query_heads * (2 * self.rank + self.rope_dim)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Attention over the K and V of another layer.

    Attributes:
      mixer: the mixer that the layer would have without sharing.
      source: number of the other layer.
    """

    mixer: Heads
    source: int

    @property
    def span(self) -> Span:
        """Which tokens a token sees."""
        return self.mixer.span

    @property
    def pair_macs(self) -> int:
        """See `Heads.pair_macs`."""
        return self.mixer.pair_macs

    decode_pair_macs = pair_macs


@dataclass(frozen=True, kw_only=True)
class State:
    """A layer whose memory is one matrix per head, updated by each token.

    Attributes:
      heads: number of heads; they are split over devices.
      values: numbers in the matrices of all heads.
      conv_values: numbers that the short convolutions of all heads keep.
    """

    heads: int
    values: int
    conv_values: int

    @property
    def token_macs(self) -> int:
        """Multiply-adds per token: the state is read for k, updated, and read for q (the delta
        rule, arXiv 2412.06464), and the convolution."""
        return 3 * self.values + self.conv_values


Mixer = Heads | Latent | Shared | State


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The part of a layer that sees one token at a time.

    Attributes:
      weights: entries of the matrices that every token uses, routers and shared experts included.
      vectors: entries of biases and other vectors.
      experts: number of routed experts; 0 for none.
      experts_per_token: number of routed experts that one token uses.
      expert_weights: entries of the matrices of one expert.
      expert_vectors: entries of the vectors of one expert.
    """

    weights: int
    vectors: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0
    expert_vectors: int = 0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
      mixer: the part that sees other tokens.
      mixer_weights: entries of its projections.
      vectors: entries of norms, and of biases of the projections.
      mlp: the part that sees one token at a time.
    """

    mixer: Mixer
    mixer_weights: int
    vectors: int
    mlp: Mlp

    @property
    def slides(self) -> bool:
        """Whether the layer keeps K and V of a bounded number of tokens."""
        return not isinstance(self.mixer, State) and self.mixer.span.limit is not None

    @property
    def token_macs(self) -> int:
        """Multiply-adds per token that do not depend on its position: matrices and states."""
        mlp = self.mlp
        macs = self.mixer_weights + mlp.weights + mlp.experts_per_token * mlp.expert_weights
        return macs + (self.mixer.token_macs if isinstance(self.mixer, State) else 0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder.

    Attributes:
      name: name of the preset, or of the folder that it was read from.
      width: E.
      layers: the layers.
      embedding: entries of the tables of tokens and positions.
      head_weights: entries of the matrix that makes logits, V * E.
      tied: whether that matrix is the embedding.
      vectors: entries of the last norm and of other vectors outside of the layers.
      max_context: tokens that the model was made for; None if its config does not say.
      notes: what was assumed or left out, to be shown with every figure.
      source: where the numbers are from.
    """

    name: str
    width: int
    layers: tuple[Layer, ...]
    embedding: int
    head_weights: int
    tied: bool
    vectors: int
    max_context: int | None = None
    notes: tuple[str, ...] = ()
    source: str = field(default="", compare=False)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        per_layer = sum(
            one.mixer_weights
            + one.vectors
            + one.mlp.weights
            + one.mlp.vectors
            + one.mlp.experts * (one.mlp.expert_weights + one.mlp.expert_vectors)
            for one in self.layers
        )
        return self.embedding + (0 if self.tied else self.head_weights) + self.vectors + per_layer

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses: of routed experts, only the chosen ones."""
        return self.parameters - sum(
            (one.mlp.experts - one.mlp.experts_per_token)
            * (one.mlp.expert_weights + one.mlp.expert_vectors)
            for one in self.layers
        )

    @cached_property
    def token_macs(self) -> int:
        """Multiply-adds per token in all layers; see `Layer.token_macs`."""
        return sum(one.token_macs for one in self.layers)

    @cached_property
    def attentions(self) -> tuple[tuple[Span, int, int], ...]:
        """For each span: the span, and the multiply-adds of a query and a key token in all layers
        with this span, in a prefill and in a decode step."""
        sums: dict[Span, tuple[int, int]] = {}
        for one in self.layers:
            mixer = one.mixer
            if not isinstance(mixer, State):
                first, second = sums.get(mixer.span, (0, 0))
                sums[mixer.span] = first + mixer.pair_macs, second + mixer.decode_pair_macs
        return tuple((span, *pair) for span, pair in sums.items())

    @property
    def kind(self) -> str:
        """The attention in a few words: `MQA 4/1, 15 of 18 layers see a window of 512`."""
        return ", ".join(_kinds(self))

    def with_kv_heads(self, kv_heads: int) -> "Model":
        """Returns the model with another number of KV heads, and smaller or larger projections.

        Raises:
          LedgerError: a layer has no KV heads of its own, or their number does not divide that of
            its query heads.
        """
        layers = []
        for one in self.layers:
            mixer = one.mixer
            if not isinstance(mixer, Heads):
                raise LedgerError(f"{self.name}: has a layer without KV heads of its own")
            if kv_heads < 1 or mixer.query_heads % kv_heads:
                raise LedgerError(
                    f"{self.name}: {kv_heads} KV heads do not divide {mixer.query_heads} heads"
                )
            gone = (mixer.kv_heads - kv_heads) * (mixer.key_dim + mixer.value_dim)
            layers.append(
                replace(
                    one,
                    mixer=replace(mixer, kv_heads=kv_heads),
                    mixer_weights=one.mixer_weights - self.width * gone,
                )
            )
        return replace(self, layers=tuple(layers))

    def with_window(self, window: int) -> "Model":
        """Returns the model with a sliding window on each layer that sees more.

        Raises:
          LedgerError: the window has no token.
        """
        check_least(1, window=window)

        def narrowed(one: Layer) -> Layer:
            mixer = one.mixer
            if not isinstance(mixer, Heads | Latent):
                return one
            if mixer.span.limit is not None and mixer.span.limit <= window:
                return one
            return replace(one, mixer=replace(mixer, span=Span(window=window)))

        return replace(self, layers=tuple(map(narrowed, self.layers)))


def _kinds(model: Model) -> Iterator[str]:
    heads = {
        (m.query_heads, m.kv_heads) for m in (x.mixer for x in model.layers) if isinstance(m, Heads)
    }
    for H, K in sorted(heads):
        yield "MHA " + str(H) if H == K else f"{'MQA' if K == 1 else 'GQA'} {H}/{K}"
    count = len(model.layers)
    latents = [x.mixer for x in model.layers if isinstance(x.mixer, Latent)]
    if latents:
        yield f"MLA {latents[0].rank} + {latents[0].rope_dim}"
    spans: dict[str, int] = {}
    for one in model.layers:
        if isinstance(one.mixer, State):
            spans["have a constant state"] = spans.get("have a constant state", 0) + 1
            continue
        span = one.mixer.span
        for words, n in (("see a window of", span.window), ("see chunks of", span.chunk)):
            if n is not None:
                spans[f"{words} {n:,}"] = spans.get(f"{words} {n:,}", 0) + 1
        if isinstance(one.mixer, Shared):
            spans["share another's K and V"] = spans.get("share another's K and V", 0) + 1
    for words, n in spans.items():
        yield f"{n} of {count} layers {words}"
