"""The model `jaxkv` of lm-evaluation-harness: an engine in any KV format, with any compression.

    import jaxkv.models.lm_eval_model  # registers the model
    lm_eval.simple_evaluate("jaxkv", "model=smollm2-135m,kv_format=int8,method=snapkv,budget=0.5",
                            tasks=["my_task"], task_manager=TaskManager(include_path="tasks"))

It needs the extra `eval`, so no other module of the package imports it when it is loaded.
`jaxkv.eval.HarnessModel` does the computation and can be used without the harness.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from jaxkv.cache import KVRanges
from jaxkv.compress import Compression
from jaxkv.engine import Engine, EngineConfig, RequestError
from jaxkv.eval import HarnessModel
from jaxkv.kv_format import preferred_page_size
from jaxkv.models.loading import load_model
from jaxkv.models.tokenizer import StreamDecoder

T = TypeVar("T")


class JaxkvLM(LM):
    """A model as the harness calls it."""

    def __init__(
        self,
        model: str = "smollm2-135m",
        kv_format: str = "f32",
        method: str | None = None,
        budget: str | float | None = None,
        interval: int | None = None,
        max_length: int | None = None,
        page_size: int | None = None,
        kv_ranges: KVRanges | None = None,
        batch_size: int | str = 8,
        **ignored: Any,
    ):
        """Loads a model. The harness passes these arguments from `model_args`.

        Args:
          model: see `jaxkv.models.loading.load_model`.
          kv_format: how K and V are stored.
          method: name of the method that drops tokens; None keeps all.
          budget: how many tokens the method keeps.
          interval: see `jaxkv.compress.Compression`.
          max_length: tokens of the longest prompt with its answer; None for the model's limit.
          page_size: tokens per page; None for what suits the format.
          kv_ranges: see `EngineConfig`.
          batch_size: maximum number of sequences in a step.
          ignored: arguments that the harness adds, such as a device.

        Raises:
          RequestError: a method without a budget, or a budget without a method.
          ValueError: the arguments do not go together.
        """
        super().__init__()
        if (method is None) != (budget is None):
            raise RequestError("method and budget must be given together")
        compression = None
        if method is not None and budget is not None:
            compression = Compression(method=method, budget=budget, interval=interval)
        loaded = load_model(model)
        tokenizer = loaded.require_tokenizer()
        config = EngineConfig(
            kv_format=kv_format,
            kv_ranges=kv_ranges,
            page_size=page_size or preferred_page_size(kv_format),
            compression=compression,
            max_length=max_length,
            max_sequences=int(batch_size) if str(batch_size).isdigit() else 8,
        )
        served = Engine(
            loaded.model, config, detokenizer=lambda: StreamDecoder(tokenizer, continues=True)
        )
        prefix = tokenizer.bos_id
        if prefix is None:
            prefix = min(tokenizer.stop_ids, default=0)
        self.served = HarnessModel(served, tokenizer, prefix_id=prefix, stop_ids=tokenizer.stop_ids)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """See `LM`."""
        return self._asked(self.served.loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See `LM`."""

        def rolling(texts: Sequence[tuple[str]], on_done: Callable[[int], object]) -> list[float]:
            return self.served.loglikelihood_rolling([text for (text,) in texts], on_done)

        return self._asked(rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See `LM`."""
        return self._asked(self.served.generate_until, requests, disable_tqdm)

    def _asked(self, serve: Callable[..., list[T]], requests: list[Any], hide: bool) -> list[T]:
        with tqdm(total=len(requests), unit="request", disable=True if hide else None) as bar:
            return serve([request.args for request in requests], bar.update)


register_model("jaxkv")(JaxkvLM)  # not as a decorator, which would hide the class's type
