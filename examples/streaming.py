"""Serve ten prompts together and print their answers while they are generated."""

from jaxkv import LLM

COUNTRIES = ["France", "Italy", "Spain", "Poland", "Norway", "Egypt", "Kenya", "Japan", "Peru"]
prompts = [f"The capital of {country} is" for country in [*COUNTRIES, "Canada"]]

llm = LLM("smollm2-135m", max_sequences=10, max_length=256)
texts = [""] * len(prompts)
for number, text in llm.stream(prompts, max_new_tokens=12):
    texts[number] += text
    print(f"prompt {number}: {text!r}")

for prompt, text in zip(prompts, texts, strict=True):
    print(prompt + text)
metrics = llm.engine.metrics
print(
    f"{metrics.generated_tokens} tokens in {metrics.num_steps} steps; {metrics.hit_rate:.0%} hits"
)
