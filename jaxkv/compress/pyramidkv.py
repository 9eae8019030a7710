"""PyramidKV: SnapKV's scores, with budgets that fall from layer to layer."""

from dataclasses import dataclass

from jaxkv.compress.method import check_integer
from jaxkv.compress.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keeps more tokens in early layers than in late ones (Cai et al., arXiv 2406.02069).

    Early layers spread their attention over many tokens; late layers concentrate it on few. Scores
    are those of `SnapKV`. All layers keep the last `window` tokens and the protected ones; what
    remains of the budget, `spare` tokens per layer on average, falls linearly over the layers:

        first layer: spare * (2 - 1 / beta)        last layer: spare / beta

    The budgets are rounded so that they sum to the number of layers times the average.

    Attributes:
      window, kernel_size: see `SnapKV`.
      beta: how steeply the budgets fall: the last layer gets `1 / beta` of the average.

    Example:
      `Compression(method=PyramidKV(beta=10), budget="50%")`
    """

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("beta", self.beta)

    @property
    def uneven(self) -> bool:
        """See `ScoreMethod.uneven`."""
        return True

    def budgets(
        self, num_layers: int, num_tokens: int, keep: int, num_protected: int = 0
    ) -> list[int]:
        """See `ScoreMethod.budgets`."""
        always = min(self.window + num_protected, keep)
        spare, available = keep - always, num_tokens - always
        last = spare / self.beta
        first = 2 * spare - last
        if first > available:
            first, last = available, 2 * spare - available
        step = (first - last) / max(1, num_layers - 1)
        exact = [first - i * step for i in range(num_layers)] if num_layers > 1 else [spare]
        budgets = [int(share) for share in exact]
        lacking = num_layers * spare - sum(budgets)  # by rounding: the first with room get one more
        for i in [i for i in range(num_layers) if budgets[i] < available][:lacking]:
            budgets[i] += 1
        return [always + share for share in budgets]
