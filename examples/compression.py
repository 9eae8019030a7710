"""Drop half of the tokens of a prompt from the cache, and count the bytes that are left."""

from jaxkv import LLM, Compression

FACTS = "The river is long. The hill is steep. The sea is wide. The road is narrow. " * 8
prompt = f"Remember: the secret word is walnut. {FACTS}\nQuestion: what is the secret word? Answer:"

for name, compression in (
    ("all tokens kept", None),
    ("snapkv, 50%", Compression(method="snapkv", budget="50%")),
):
    with LLM("smollm2-135m", max_sequences=1, max_length=512, compression=compression) as llm:
        answer = llm.generate(prompt, max_new_tokens=12)
        spec = llm.engine.spec
    left = answer.prompt_tokens + len(answer.tokens) - round(answer.dropped_tokens)
    print(f"{name}: {answer.text.strip()!r}")
    print(
        f"  {answer.prompt_tokens} prompt tokens, {answer.dropped_tokens:.0f} dropped per KV head; "
        f"the {left} that are left need {spec.sequence_bytes(left) / 2**20:.1f} MiB"
    )
