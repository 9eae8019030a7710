"""Serve ten prompts together and print their answers while they are generated."""

from jaxkv import LLM

COUNTRIES = ["France", "Italy", "Spain", "Poland", "Norway", "Egypt", "Kenya", "Japan", "Peru"]
SHARED = "This is a list of the countries of the world and of their capitals, one in each sentence."
prompts = [f"{SHARED} The capital of {country} is" for country in [*COUNTRIES, "Canada"]]

llm = LLM("smollm2-135m", max_sequences=10, max_length=256)
texts = [""] * len(prompts)
for number, text in llm.stream(prompts, max_new_tokens=12):
    texts[number] += text
    print(f"prompt {number}: {text!r}")

for prompt, text in zip(prompts, texts, strict=True):
    print((prompt + text).removeprefix(SHARED + " "))
metrics = llm.engine.metrics
print(f"{metrics.generated_tokens} tokens in {metrics.num_steps} steps")
print(f"{metrics.hit_rate:.0%} of the prompt tokens came from the cache")
