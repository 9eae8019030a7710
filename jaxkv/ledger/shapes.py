"""What a transformer decoder keeps and computes, layer by layer, as numbers alone.

A layer's *mixer* is what it sees other tokens by:

    Heads    K and V of each KV head: MHA, GQA, MQA; of all tokens, of a window, or of a chunk
    Latent   one vector a token for all heads, from which K and V are made (MLA, arXiv 2405.04434)
    Shared   nothing of its own: it reads the K and V of an earlier layer
    State    a constant state, whatever the length: linear attention

Not here: how a `config.json` becomes this (`config_json`), nor bytes (`memory`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxkv.ledger.errors import LedgerError, check_least


@dataclass(frozen=True, kw_only=True)
class Span:
    """Which tokens before it a token sees.

    Attributes:
      window: so many, itself included.
      chunk: those of its own chunk of so many tokens, counted from the sequence's beginning.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that are seen; None where that grows with the sequence."""
        return self.chunk if self.window is None else self.window

    def seen(self, position: int) -> int:
        """Tokens that the token at a position sees, itself included."""
        if self.window is not None:
            return min(position + 1, self.window)
        return position % self.chunk + 1 if self.chunk is not None else position + 1


ALL = Span()


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention with K and V of its own.

    Attributes:
      query_heads, kv_heads: H and K.
      key_dim, value_dim: D of K and of V.
      span: what a token sees.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    span: Span = ALL

    @property
    def pair_macs(self) -> int:
        """Multiply-adds of one query token with one key token: the score, and its value's part."""
        return self.query_heads * (self.key_dim + self.value_dim)

    decode_pair_macs = pair_macs

    def kv_heads_of(self, devices: int) -> int:
        """KV heads on each of so many devices; one head may be on several.

        Raises:
          LedgerError: heads do not split evenly.
        """
        if self.kv_heads % devices == 0:
            return self.kv_heads // devices
        if devices % self.kv_heads:
            raise LedgerError(f"{self.kv_heads} KV heads do not split over {devices} devices")
        return 1


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention: each device of a tensor-parallel split has all of the latent.

    Attributes:
      query_heads: H.
      rank: of the vector that K and V are made of.
      rope_dim: of the key part that all heads share.
      nope_dim, value_dim: of a head's own key part, and of its value.
    """

    query_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    span: Span = ALL

    @property
    def pair_macs(self) -> int:
        """Multiply-adds of a query and a key token in a prefill, which makes K and V of latents."""
        return self.query_heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @property
    def decode_pair_macs(self) -> int:
        """The same in a decode step, which stays in the latent's space."""
        return self.query_heads * (2 * self.rank + self.rope_dim)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Attention over another layer's K and V.

    Attributes:
      mixer: what the layer would have of its own.
      source: the other layer.
    """

    mixer: Heads
    source: int

    @property
    def span(self) -> Span:
        """What a token sees."""
        return self.mixer.span

    @property
    def pair_macs(self) -> int:
        """See Heads."""
        return self.mixer.pair_macs

    decode_pair_macs = pair_macs


@dataclass(frozen=True, kw_only=True)
class State:
    """A layer whose memory is a matrix for each head, updated at each token.

    Attributes:
      heads: that have a matrix; split over devices.
      values: numbers in the matrices of all heads.
      conv_values: numbers of the short convolution before them, of all heads.
    """

    heads: int
    values: int
    conv_values: int

    @property
    def token_macs(self) -> int:
        """Multiply-adds a token: what the state holds for k is read, it is updated, q reads it (the
        delta rule, arXiv 2412.06464), and the convolution."""
        return 3 * self.values + self.conv_values


Mixer = Heads | Latent | Shared | State


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """What a layer does with each token alone.

    Attributes:
      weights: entries of matrices that every token meets, routers and shared experts included.
      vectors: biases and the like.
      experts: routed experts; 0 for none.
      experts_per_token: of them.
      expert_weights, expert_vectors: of one.
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
      mixer: how it sees other tokens.
      mixer_weights: entries of its projections.
      vectors: norms, and biases of the projections.
      mlp: what it does with a token alone.
    """

    mixer: Mixer
    mixer_weights: int
    vectors: int
    mlp: Mlp

    @property
    def slides(self) -> bool:
        """It keeps K and V, but never more than a number of tokens of them."""
        return not isinstance(self.mixer, State) and self.mixer.span.limit is not None

    @property
    def token_macs(self) -> int:
        """Multiply-adds of one token, whatever stands before it: of matrices and of a state."""
        mlp = self.mlp
        macs = self.mixer_weights + mlp.weights + mlp.experts_per_token * mlp.expert_weights
        return macs + (self.mixer.token_macs if isinstance(self.mixer, State) else 0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder.

    Attributes:
      name: of a preset, or the file it was read from.
      width: E.
      layers: its layers.
      embedding: entries of the tables that tokens (and positions) are looked up in.
      head_weights: entries of the matrix that makes logits, V * E.
      tied: that matrix is the embedding.
      vectors: of the last norm, and other parameters outside of layers.
      max_context: tokens that it was made for; None where its config does not say.
      notes: what was assumed or left out; to be shown beside every figure.
      source: where its numbers are from.
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
        """All parameters."""
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
        """Those that one token meets: of routed experts, the chosen ones."""
        return self.parameters - sum(
            (one.mlp.experts - one.mlp.experts_per_token)
            * (one.mlp.expert_weights + one.mlp.expert_vectors)
            for one in self.layers
        )

    @cached_property
    def token_macs(self) -> int:
        """Multiply-adds of one token in all layers; see `Layer`."""
        return sum(one.token_macs for one in self.layers)

    @cached_property
    def attentions(self) -> tuple[tuple[Span, int, int], ...]:
        """Of the layers with one span: the span, and the multiply-adds of a token and one that it
        sees, in a prefill and in a decode step."""
        sums: dict[Span, tuple[int, int]] = {}
        for one in self.layers:
            mixer = one.mixer
            if not isinstance(mixer, State):
                first, second = sums.get(mixer.span, (0, 0))
                sums[mixer.span] = first + mixer.pair_macs, second + mixer.decode_pair_macs
        return tuple((span, *pair) for span, pair in sums.items())

    @property
    def kind(self) -> str:
        """Its attention in a few words: `GQA 32/8`, `MLA`, `MQA 4/1, 15 of 18 layers see 512`."""
        return ", ".join(_kinds(self))

    def with_kv_heads(self, kv_heads: int) -> "Model":
        """The model with another number of KV heads in each of its layers, and projections for it.

        Raises:
          LedgerError: a layer has none, or they do not divide its query heads.
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
        """The model with a sliding window on each layer that sees more.

        Raises:
          LedgerError: it is of no token.
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
