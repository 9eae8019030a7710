"""StreamingLLM: the first tokens and the most recent ones stay (Xiao et al., arXiv 2309.17453).

Attention parks what it has no use for on the first tokens; without them a window's output is none
that the model was trained on. They are seen as if all tokens between them and the window were not
there: a sequence may be longer than any that the model was made for. No key is rewritten for that:
the query is rotated once more, as if it stood where the cache ends (`jaxkv.attention.sink_tokens`).
"""

NAME = "streaming_llm"
SINKS = 4
