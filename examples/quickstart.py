"""Load a model, continue a text, and answer several prompts together."""

from jaxkv import LLM, SamplingParams

with LLM("smollm2-135m", max_length=512) as llm:
    answer = llm.generate("The capital of France is", max_new_tokens=8)
    print(answer.text)

    prompts = ["Water boils at", "The first ten prime numbers are"]
    for prompt, answer in zip(prompts, llm.generate(prompts, max_new_tokens=16), strict=True):
        print(f"{prompt!r} -> {answer.text!r}")

    story = llm.generate("Once upon a time", SamplingParams(temperature=0.8, seed=1))
    print(story.text, f"({len(story.tokens)} tokens, {story.finish_reason})")

    # A chat: the second turn finds the first one in the cache.
    messages = [{"role": "user", "content": "What is a KV cache? Answer in one sentence."}]
    answer = llm.chat(messages, max_new_tokens=48)
    print(answer.text)
    messages.append({"role": "assistant", "content": answer.text})
    messages.append({"role": "user", "content": "What does it cost?"})
    answer = llm.chat(messages, max_new_tokens=48)
    print(answer.text)
    print(f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were cached")
