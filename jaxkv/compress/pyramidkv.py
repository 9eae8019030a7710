"""PyramidKV: SnapKV's scores, with a budget that falls from layer to layer (Cai et al., arXiv
2406.02069)."""

from jaxkv.compress.snapkv import WINDOW, SnapKV

BETA = 20  # the last layer's budget is that part of the average


class PyramidKV(SnapKV):
    """Early layers spread their attention and keep more; budgets fall linearly, and beside the last
    WINDOW tokens and those that are protected the first layer keeps 2 - 1 / BETA of the average,
    the last one 1 / BETA."""

    name = "pyramidkv"
    by_layer = True

    def budgets(
        self, num_layers: int, num_tokens: int, keep: int, num_protected: int = 0
    ) -> list[int]:
        """See `ScoreMethod.budgets`; they add up to `num_layers * keep`."""
        sure = min(WINDOW + num_protected, keep)
        spare, most = keep - sure, num_tokens - sure
        least = spare / BETA
        first = 2 * spare - least
        if first > most:
            first, least = most, 2 * spare - most
        step = (first - least) / max(1, num_layers - 1)
        exact = [first - i * step for i in range(num_layers)] if num_layers > 1 else [spare]
        budgets = [int(share) for share in exact]
        left = num_layers * spare - sum(budgets)  # by rounding: to the first that have room
        for i in [i for i in range(num_layers) if budgets[i] < most][:left]:
            budgets[i] += 1
        return [sure + share for share in budgets]
