"""The KV cache of transformer decoding, as a JAX array program.

`jaxkv.LLM` runs a model: text in, text out.

    from jaxkv import LLM

    llm = LLM("smollm2-135m")
    print(llm.generate("The capital of France is", max_new_tokens=8).text)

`Engine` serves token ids with continuous batching. `KVCache`, `init_cache` and `update_and_attend`
are the functional cache for a model of your own. `PrefixIndex` and `PagePool` are the host-side
books of which page belongs to which tokens.

The names below are imported when they are first used, so `import jaxkv`, `jaxkv.ledger` and
`jaxkv.prefix` do not load JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.attention import update_and_attend
    from jaxkv.cache import CacheSpec, KVCache, LayerSpec, init_cache
    from jaxkv.compress import Compression
    from jaxkv.engine import Engine, EngineConfig, Request, SamplingParams
    from jaxkv.llm import LLM
    from jaxkv.prefix import PagePool, PrefixIndex

    __version__: str

__all__ = [
    "LLM",
    "CacheSpec",
    "Compression",
    "Engine",
    "EngineConfig",
    "KVCache",
    "LayerSpec",
    "PagePool",
    "PrefixIndex",
    "Request",
    "SamplingParams",
    "__version__",
    "init_cache",
    "update_and_attend",
]

_MODULES = {
    "jaxkv.attention": ("update_and_attend",),
    "jaxkv.cache": ("CacheSpec", "KVCache", "LayerSpec", "init_cache"),
    "jaxkv.compress": ("Compression",),
    "jaxkv.engine": ("Engine", "EngineConfig", "Request", "SamplingParams"),
    "jaxkv.llm": ("LLM",),
    "jaxkv.prefix": ("PagePool", "PrefixIndex"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("jaxkv")  # pyproject.toml states it
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
