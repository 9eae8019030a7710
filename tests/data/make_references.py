"""Make the reference outputs in this folder with Hugging Face transformers.

  python -m venv references-env
  references-env/bin/pip install torch transformers accelerate gguf sentencepiece
  references-env/bin/python tests/data/make_references.py tiny
  references-env/bin/python tests/data/make_references.py smollm2 MODEL.gguf
  references-env/bin/python tests/data/make_references.py gemma3 MODEL.gguf

This script imports nothing of jaxkv, so that the references are independent of it. `tiny` makes one
model of random weights per family and stores the logits of every token. `smollm2` and `gemma3` take
the GGUF file that `jaxkv.models.pretrained.model_path` returns for "smollm2-135m" and
"gemma3-270m", and store what the model says about the texts of `prompts.json`. README.md describes
the files.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).resolve().parent
WINDOW = 24
TINY_LENGTHS = (1, 23, 24, 25, 130)  # prompts around the window, and one that is far longer
NEW_TOKENS = 64
KEPT_LOGITS = 2048  # evenly spaced token ids whose logits are stored for a real model
BEST_LOGITS = 64  # ids of the largest logits, stored too

# What all tiny models have, and what each family has of its own.
SIZES = dict(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
FAMILIES = {
    "llama3_rope": (
        transformers.LlamaConfig,
        dict(
            head_dim=16,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
    ),
    "mistral_window": (transformers.MistralConfig, dict(sliding_window=WINDOW)),
    # Qwen 2 has no key head_dim: it is hidden_size / num_attention_heads.
    "qwen2_bias": (
        transformers.Qwen2Config,
        dict(hidden_size=96, head_dim=None, tie_word_embeddings=True),
    ),
    "qwen3_qknorm": (transformers.Qwen3Config, dict()),
    "gemma2_softcap": (
        transformers.Gemma2Config,
        dict(
            sliding_window=WINDOW,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=15.0,
        ),
    ),
    "gemma3_local_global": (
        transformers.Gemma3TextConfig,
        dict(
            num_hidden_layers=7,
            num_key_value_heads=1,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
            rope_parameters=dict(
                full_attention=dict(rope_type="default", rope_theta=1000000.0),
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            ),
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("tiny", help="models of random weights, one per family")
    for name in ("smollm2", "gemma3"):
        command = commands.add_parser(name, help=f"what the real {name} says of prompts.json")
        command.add_argument("model", type=Path, help="its GGUF file")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.what == "tiny":
        for seed, name in enumerate(FAMILIES):
            make_tiny(name, seed)
    else:
        make_real(args.what, args.model)


def made_with() -> dict[str, str]:
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "dtype": "float32",
        "attention": "eager",
    }


def make_tiny(name: str, seed: int) -> None:
    """Saves a model of random weights in bfloat16, and its logits in float32 for five prompts."""
    config_class, own = FAMILIES[name]
    options = {key: value for key, value in (SIZES | own).items() if value is not None}
    config = config_class(**options, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rng = np.random.default_rng(seed)
    for _, weight in model.named_parameters():
        noise = torch.from_numpy(rng.standard_normal(tuple(weight.shape)).astype(np.float32))
        # Norms stay around 1 or 0, where they begin, and biases around 0.
        is_matrix = weight.ndim == 2
        value = noise * 1.2 / weight.shape[1] ** 0.5 if is_matrix else weight + 0.3 * noise
        weight.copy_(value.to(torch.bfloat16))  # what is saved is what is run
    folder = DATA / "tiny" / name
    stored = {}
    for i, length in enumerate(TINY_LENGTHS):
        ids = rng.integers(0, config.vocab_size, length)
        logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
        stored[f"s{i}/ids"] = ids.astype(np.int32)
        stored[f"s{i}/logits"] = logits.numpy()
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "reference.npz", **stored)
    print(name, f"{sum(p.numel() for p in model.parameters()):,} parameters,", end=" ")
    print(f"standard deviation of logits {logits.std():.2f}")


def make_real(name: str, path: Path) -> None:
    """Stores ids, log-probabilities, logits and greedy continuations of a real model."""
    where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if name == "smollm2":  # the file only names the rule by which its model splits text: "smollm"
        split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    texts = json.loads((DATA / "prompts.json").read_text("utf-8"))
    arrays, cases = {}, {}
    for case, prompt in texts.items():
        text = prompt.get("text") or chat_text(name, tokenizer, prompt["chat"])
        ids = prompt_ids(name, tokenizer, text)[: prompt["cut"]]
        found = ask(model, ids)
        continuation = tokenizer.decode(found["cont_ids"], skip_special_tokens=False)
        cases[case] = {"text": text, "cut": prompt["cut"], "continuation": continuation}
        arrays |= {f"{case}/{key}": value for key, value in found.items()}
        print(f"{name} {case}: {len(ids)} tokens, {continuation[:50]!r}", flush=True)
    np.savez_compressed(DATA / f"{name}.npz", **arrays)
    text = json.dumps({"made_with": made_with(), "cases": cases}, indent=1, ensure_ascii=False)
    (DATA / f"{name}.json").write_text(text + "\n", "utf-8")


def ask(model, ids: list[int]) -> dict[str, np.ndarray]:
    """Returns log-probabilities of a prompt and its greedy continuation, past stop tokens."""
    out = model(torch.tensor([ids]), use_cache=True)
    logprobs = out.logits[0].log_softmax(-1)
    said = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
    last = out.logits[0, -1]
    kept = np.arange(0, len(last), len(last) // KEPT_LOGITS)
    kept = np.union1d(kept, last.topk(BEST_LOGITS).indices.numpy()).astype(np.int32)
    tokens, their_logprobs, margins = [], [], []
    logits, cache = last, out.past_key_values
    for _ in range(NEW_TOKENS):
        first, second = logits.topk(2).values.tolist()
        token = int(logits.argmax())
        tokens.append(token)
        margins.append(first - second)
        their_logprobs.append(float(logits.log_softmax(-1)[token]))
        out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        logits, cache = out.logits[0, -1], out.past_key_values
    return {
        "ids": np.array(ids, np.int32),
        "prompt_logprobs": np.concatenate([[np.nan], said]).astype(np.float32),
        "logit_ids": kept,
        "logits_last": last.numpy()[kept],
        "logits_last_lse": last.double().logsumexp(-1).numpy(),
        "cont_ids": np.array(tokens, np.int32),
        "cont_logprobs": np.array(their_logprobs, np.float32),
        "cont_margin": np.array(margins, np.float32),
    }


def chat_text(name: str, tokenizer, message: str) -> str:
    """One user message and the start of the answer, rendered without BOS."""
    if name == "gemma3":  # a base model, whose file has no template
        return f"<start_of_turn>user\n{message}<end_of_turn>\n<start_of_turn>model\n"
    messages = [{"role": "user", "content": message}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def prompt_ids(name: str, tokenizer, text: str) -> list[int]:
    """Token ids; a prompt of Gemma begins with BOS."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *ids] if name == "gemma3" else ids


if __name__ == "__main__":
    main()
