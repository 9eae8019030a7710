"""Pages, page tables and the prefix index, without a model. JAX is not imported.

Two requests begin with the same tokens: the second one gets the pages of the first.
"""

import sys

from jaxkv import PagePool, PrefixIndex
from jaxkv.prefix import Namespace, PageTables, pack

P = 4  # tokens per page
pool = PagePool(num_pages=16)  # page 0 is the null page: 15 are free
index = PrefixIndex([pool], P)
tables = PageTables([pool], P, max_sequences=2, max_pages=8, index=index)
namespace = Namespace(kv_format="bf16")  # only equal namespaces share pages


def serve(tokens: list[int]) -> None:
    """Does for one request what the engine's scheduler does."""
    row = tables.open()
    # The last token is always computed: its logits give the first token of the answer.
    found, (copy_from,) = tables.match(row, pack(tokens[:-1]), namespace)
    tables.grow(row, len(tokens))
    pages = tables.pages[0][row, : -(-len(tokens) // P)].tolist()
    print(f"{len(tokens)} tokens: {found} cached, pages {pages}", end="")
    print(f", page {copy_from} is copied first" if copy_from else "")
    # ... a step would now compute tokens[found:] and write their K and V into the pages ...
    tables.publish(row, pack(tokens), namespace)
    tables.close(row)


serve([7, 7, 7, 7, 8, 8, 8, 8, 9, 1])
serve([7, 7, 7, 7, 8, 8, 8, 8, 9, 2, 3])  # shares two pages, and one token of the third
print(f"{pool.num_free} pages are free, the others are cached; hits {index.counters.hit_rate:.0%}")
index.evict(0, 2)  # group 0, two pages: the least recently used go first
print(f"{pool.num_free} pages are free after an eviction")
assert "jax" not in sys.modules
