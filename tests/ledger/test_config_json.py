"""A config.json read: each kind of attention, and what is refused or noted by name."""

import json

import pytest

from jaxkv.ledger import LedgerError, Model, load_config, model_from_config, preset, preset_names
from jaxkv.ledger.presets import stated_parameters
from jaxkv.ledger.shapes import Heads, Latent, Shared, State
from tests.ledger.test_memory import config

PRESETS = preset_names()


def read(**keys) -> Model:
    """The model of a small Llama's config with other keys; None takes a key out."""
    raw = {key: value for key, value in config(**keys).items() if value is not None}
    return model_from_config(raw, name="small")


def limits(model: Model) -> list[int | None]:
    return [one.mixer.span.limit for one in model.layers if not isinstance(one.mixer, State)]


def test_there_are_presets_of_each_family_named_as_on_the_hub():
    assert len(PRESETS) >= 25
    assert all(name == name.lower() for name in PRESETS)
    assert {"llama-2-7b", "llama-3.1-8b", "qwen3-8b", "smollm2-135m"} <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_the_parameters_of_a_preset_are_those_that_its_repository_states(name):
    model, stated = preset(name), stated_parameters(name)
    assert model.source.endswith(" config.json")
    if stated is None:  # only a text model, or one layer is missing: its note says so
        assert model.notes
        total = {"llama-4-scout-17b-16e": 109e9, "llama-4-maverick-17b-128e": 402e9}
        total |= {"gemma-3-4b-pt": 4_300_079_472, "gemma-3-12b-pt": 12_187_325_040}
        total |= {"gemma-3-27b-pt": 27_432_406_640, "gemma-3n-e4b": 6.87e9}
        total |= {"qwen3-next-80b-a3b-instruct": 81.3e9, "kimi-k2-instruct": 1.03e12}
        assert 0.9 * total[name] < model.parameters <= total[name]
    else:
        assert model.parameters == stated


# Whole files as they are on the hub, but for token ids: every key is read, or known to be harmless.
QUANTISED = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WHOLE = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "auto_map": {"AutoConfig": "x"}, "aux_loss_alpha": 0.001,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": QUANTISED,
        "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 40}, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0}, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": 201088,
    },
    "smollm3-3b": {
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
        "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0,
        "sliding_window": None, "use_cache": False, "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "phi-4-mini-instruct": {
        "attention_bias": False, "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "longrope"}, "rope_theta": 10000.0, "sliding_window": 262144,
        "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "falcon-7b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0, "bias": False, "hidden_dropout": 0.0, "hidden_size": 4544,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
        "num_hidden_layers": 32, "parallel_attn": True, "vocab_size": 65024,
    },
    "gpt2": {
        "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {}}, "vocab_size": 50257,
    },
    "gemma-3-4b-pt": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "image_token_index": 262144, "initializer_range": 0.02,
        "mm_tokens_per_image": 256, "model_type": "gemma3", "vision_config": {"hidden_size": 1152},
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0}, "sliding_window": 1024,
        },
    },
    "llama-4-scout-17b-16e": {
        "boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092,
        "model_type": "llama4", "tie_word_embeddings": False, "vision_config": {},
        "text_config": {
            "_attn_implementation_autoset": True, "attention_bias": False,
            "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
            "attn_temperature_tuning": 4, "floor_scale": 8192, "for_llm_compressor": False,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "max_position_embeddings": 262144,
            "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40,
            "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 16.0}, "rope_theta": 500000.0,
            "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True,
            "vocab_size": 202048,
        },
    },
    "minimax-text-01": {
        "attention_dropout": 0.0, "attn_type_list": ([0] * 7 + [1]) * 10, "block_size": 256,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 9216,
        "layernorm_full_attention_alpha": 3.5, "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_alpha": 3.5, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_alpha": 3.5, "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 10240000, "model_type": "minimax_text_01",
        "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80,
        "num_key_value_heads": 8, "num_local_experts": 32, "postnorm": True,
        "rope_theta": 10000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "vocab_size": 200064,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_is_read_as_its_preset(name):
    model, known = model_from_config(WHOLE[name], name=name), preset(name)
    assert model.layers == known.layers
    assert model.parameters == known.parameters
    assert not [note for note in model.notes if "not known" in note]


def test_a_preset_is_found_in_any_case_and_a_misspelt_one_suggested():
    assert preset("Llama-2-7B") == preset("llama-2-7b")
    assert preset("gemma3-270m").name == "gemma-3-270m"
    with pytest.raises(LedgerError, match="no preset 'lama-2-7b'; did you mean llama-2-7b"):
        preset("lama-2-7b")


@pytest.mark.parametrize(
    "name, kind",
    [
        ("llama-2-7b", "MHA 32"),
        ("llama-2-70b", "GQA 64/8"),
        ("falcon-7b", "MQA 71/1"),
        ("deepseek-v3", "MLA 512 + 64"),
        ("gemma-3-270m", "MQA 4/1, 15 of 18 layers see a window of 512"),
        ("gpt-oss-20b", "GQA 64/8, 12 of 24 layers see a window of 128"),
        ("llama-4-scout-17b-16e", "GQA 40/8, 36 of 48 layers see chunks of 8,192"),
        ("qwen3-next-80b-a3b-instruct", "GQA 16/2, 36 of 48 layers have a constant state"),
        ("minimax-text-01", "GQA 64/8, 70 of 80 layers have a constant state"),
    ],
)
def test_each_kind_of_attention_is_read(name, kind):
    assert preset(name).kind == kind


def test_layers_share_with_the_last_own_one_of_their_kind():
    mixers = [one.mixer for one in preset("gemma-3n-e4b").layers]
    shared = {i: m.source for i, m in enumerate(mixers) if isinstance(m, Shared)}
    assert list(shared) == list(range(20, 35))
    assert {i: shared[i] for i in (20, 23, 24, 34)} == {20: 18, 23: 18, 24: 19, 34: 19}
    crossed = read(use_cla=True, cla_share_factor=2)
    assert [isinstance(one.mixer, Shared) for one in crossed.layers] == [False, True] * 2


def test_windows_follow_the_familys_rule_or_the_list():
    gemma = config(model_type="gemma3_text", sliding_window=16, head_dim=8)
    assert limits(model_from_config(gemma, name="g")) == [16] * 4
    listed = ["full_attention", "sliding_attention"] * 2
    assert limits(read(layer_types=listed, sliding_window=7)) == [None, 7, None, 7]
    off = {"sliding_window": 9, "use_sliding_window": False, "max_window_layers": 0}
    assert limits(read(model_type="qwen2", **off)) == [None] * 4
    on = off | {"use_sliding_window": True, "max_window_layers": 3}
    assert limits(read(model_type="qwen2", **on)) == [None, None, None, 9]


@pytest.mark.parametrize(
    "keys, kind",
    [
        ({}, "GQA 8/4"),
        ({"sliding_window": 8}, "GQA 8/4, 4 of 4 layers see a window of 8"),
        (
            {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
            "MLA 16 + 4",
        ),
        ({"num_local_experts": 4, "num_experts_per_tok": 2}, "GQA 8/4"),
    ],
)
def test_a_model_type_that_is_not_known_is_read_by_its_keys_with_a_note(keys, kind):
    for model_type, words in (("no-such", "'no-such' is not known"), (None, "is missing")):
        model = read(model_type=model_type, **keys)
        assert model.kind == kind
        assert model.notes[0] == f"model_type {words}: read by its keys, otherwise as a Llama"


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_attention_heads": None}, "has no num_attention_heads"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"intermediate_size": None}, "has no intermediate_size"),
        ({"num_key_value_heads": 3}, "= 3 does not divide num_attention_heads = 8"),
        ({"hidden_size": 60}, "num_attention_heads = 8 does not divide hidden_size = 60"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1 must be a whole number from 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 is more layers than"),
        ({"hidden_size": 10**30}, "hidden_size = 1000"),
        ({"hidden_size": "64"}, "hidden_size = '64' must be a whole number"),
        ({"hidden_size": True}, "hidden_size = True must be a whole number"),
        ({"hidden_size": None, "n_embd": -3}, "n_embd = -3 must be a whole number"),
        ({"head_dim": 0}, "head_dim = 0 must be a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0 must be a whole number"),
        ({"num_hidden_layers": 4, "n_layer": 5}, "num_hidden_layers = 4 and n_layer = 5 contra"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, num_hidden_layers is 4"),
        ({"layer_types": ["odd"] * 4}, "layer_types = 'odd' is none of full_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "has no sliding_window"),
        ({"layer_types": ["chunked_attention"] * 4}, "has no attention_chunk_size"),
        ({"layer_types": ["linear_attention"] * 4}, "has no linear_num_key_heads"),
        ({"layer_types": "full"}, "layer_types = 'full' must be a list of strings"),
        ({"sliding_window": 16}, "sliding_window = 16 is not known here, and may change the mem"),
        ({"kv_compression": 2}, "kv_compression = 2 is not known here"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "needs sliding_window and max_wind"),
        ({"model_type": "minimax_text_01", "attn_type_list": [0, 1, 2, 1]}, "neither 0 nor 1"),
        ({"model_type": "mixtral"}, "has no num_local_experts"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok = 3 is more than there are experts, 2",
        ),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "has no qk_rope_head_dim"),
        ({"model_type": "falcon", "multi_query": True}, "multi_query = True contradicts num_kv"),
        ({"use_cla": True}, "has no cla_share_factor"),
        ({"cla_share_factor": 2, "num_kv_shared_layers": 1}, "contradict each other"),
        ({"num_kv_shared_layers": 4}, "leaves layer 0 no layer of its kind to share with"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' must be true or false"),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 4,
                "sliding_window_pattern": 2,
                "layer_types": ["full_attention"] * 4,
            },
            "layer_types and sliding_window_pattern contradict each other",
        ),
    ],
)
def test_what_is_missing_contradictory_or_unknown_is_refused_by_name(keys, message):
    with pytest.raises(LedgerError, match=f"^config.json: .*{message}"):
        read(**keys)


SLIDING, FULL, CHUNKED = (
    ["sliding_attention"] * 4,
    ["full_attention"] * 4,
    ["chunked_attention"] * 4,
)
OFF = {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}
ON = OFF | {"use_sliding_window": True}
LLAMA4 = {
    "model_type": "llama4_text", "intermediate_size_mlp": 64, "num_local_experts": 2,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "keys, other",
    [
        ({"model_type": "qwen3", "layer_types": SLIDING, **OFF}, "use_sliding_window"),
        (
            {"model_type": "qwen3", "layer_types": SLIDING, "sliding_window": 8},
            "a missing use_sliding_window, which is false,",
        ),
        ({"model_type": "qwen2", "layer_types": FULL, **ON}, "max_window_layers"),
        ({"layer_types": SLIDING, **ON, "max_window_layers": 2}, "max_window_layers"),
        (
            {
                "model_type": "mistral",
                "layer_types": SLIDING,
                "sliding_window": 8,
                "use_sliding_window": False,
            },
            "use_sliding_window",
        ),
        ({"model_type": "mistral", "layer_types": FULL, "sliding_window": 8}, "sliding_window"),
        ({**LLAMA4, "layer_types": FULL, "attention_chunk_size": 8}, "attention_chunk_size"),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 8,
                "_sliding_window_pattern": 2,
                "layer_types": SLIDING,
            },
            "_sliding_window_pattern",
        ),
        ({**LLAMA4, "layer_types": CHUNKED, "no_rope_layer_interval": 2}, "no_rope_layer_interval"),
    ],
)
def test_a_list_of_kinds_agrees_with_every_key_that_speaks_of_them(keys, other):
    with pytest.raises(LedgerError, match=f"layer_types and {other} contradict each other"):
        read(**keys)


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"model_type": "qwen3", "layer_types": FULL, **OFF}, [None] * 4),
        ({"model_type": "qwen3", "layer_types": SLIDING, **ON}, [8] * 4),
        ({"model_type": "qwen3", "layer_types": FULL, **ON, "max_window_layers": 4}, [None] * 4),
        (
            {"model_type": "ministral", "layer_types": FULL[:2] + SLIDING[:2], "sliding_window": 8},
            [None, None, 8, 8],
        ),
        ({"model_type": "mistral", "layer_types": FULL}, [None] * 4),
        ({"_sliding_window_pattern": 2, "sliding_window": 8, "model_type": "odd"}, [8, None] * 2),
        ({**LLAMA4, "layer_types": CHUNKED, "attention_chunk_size": 8}, [8] * 4),
    ],
)
def test_a_list_of_kinds_beside_keys_that_agree_is_taken(keys, expected):
    model = read(**keys)
    assert limits(model) == expected
    assert not [note for note in model.notes if "window" in note]


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, [8_192] * 3 + [None]),
        ({"attention_chunk_size": 16}, [16] * 3 + [None]),
        ({"no_rope_layer_interval": 2}, [8_192, None] * 2),
        ({"no_rope_layers": [0, 1, 1, 0]}, [None, 8_192, 8_192, None]),
        ({"no_rope_layers": [1, 0] * 2, "no_rope_layer_interval": 2}, [8_192, None] * 2),
    ],
)
def test_layers_of_llama_4_with_rope_see_chunks_of_the_familys_size(keys, expected):
    model = read(**LLAMA4, **keys)
    assert limits(model) == expected
    note = "attention_chunk_size is missing: taken as 8,192, the family's own"
    assert (note in model.notes) == ("attention_chunk_size" not in keys)


def test_a_chunk_size_of_null_is_none():
    raw = config(**LLAMA4, attention_chunk_size=None)
    assert limits(model_from_config(raw, name="small")) == [None] * 4


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"no_rope_layers": [0, 1, 2, 1]}, "no_rope_layers = .* neither 0 nor 1"),
        ({"no_rope_layers": [0, 1, 1, 1], "no_rope_layer_interval": 4}, "interval = 4 contradict"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0 must be a whole number from 1"),
    ],
)
def test_which_layers_have_rope_is_said_once_and_for_all(keys, message):
    with pytest.raises(LedgerError, match=message):
        read(**LLAMA4, **keys)


MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SAID = {"q_lora_rank": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
DEEPSEEK = {"model_type": "deepseek_v3", **MLA, **ROUTED, **SAID}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "model_type, notes",
    [
        (
            "deepseek_v3",
            {
                "q_lora_rank": "taken as 1,536, the family's own",
                "first_k_dense_replace": "taken as 3, the family's own",
                "n_shared_experts": "taken as 1, the family's own",
            },
        ),
        ("deepseek_v2", {"q_lora_rank": "taken as 1,536, the family's own"}),
        ("kimi_k2", {"q_lora_rank": "q is taken as projected in one step"}),
        ("kimi_k2", {"first_k_dense_replace": "no layer is taken as dense"}),
        ("odd", {"n_shared_experts": "taken as none"}),
    ],
)
def test_a_key_of_experts_or_latents_that_is_missing_has_a_note(model_type, notes):
    keys = {"model_type": model_type, **MLA, **ROUTED}
    assert not [
        note for note in read(**keys, **SAID).notes if "is missing" in note and "_r" in note
    ]
    model = read(**keys, **{k: v for k, v in SAID.items() if k not in notes})
    for name, words in notes.items():
        assert f"{name} is missing: {words}" in model.notes


@pytest.mark.parametrize("model_type, size", [("qwen2_moe", "5,632"), ("qwen3_next", "512")])
def test_a_shared_expert_is_the_familys_own_where_no_key_says(model_type, size):
    model = read(model_type=model_type, **QWEN_MOE, layer_types=FULL)
    note = f"shared_expert_intermediate_size is missing: taken as {size}, the family's own"
    assert note in model.notes


@pytest.mark.parametrize(
    "keys, message",
    [
        ({**DEEPSEEK, "first_k_dense_replace": 5}, "replace = 5 is more than there are layers, 4"),
        (
            {**DEEPSEEK, "num_key_value_heads": "x"},
            "num_key_value_heads = 'x' must be a whole number",
        ),
        (
            {**DEEPSEEK, "layer_types": SLIDING, "sliding_window": 8},
            "layer_types asks for sliding_att",
        ),
        (
            {**DEEPSEEK, "sliding_window": 8, "model_type": "odd"},
            "sliding_window asks for sliding_att",
        ),
        ({**DEEPSEEK, "sliding_window": 8}, "sliding_window = 8 is not known here"),
        (
            {**DEEPSEEK, "layer_types": ["linear_attention"] * 4},
            "layer_types asks for linear_attent",
        ),
        (
            {**QWEN_MOE, "model_type": "qwen3_moe", "mlp_only_layers": [4]},
            "= 4 is none of 4 layers",
        ),
        ({**LLAMA4, "moe_layers": [1, 9]}, "moe_layers = 9 is none of 4 layers, 0 to 3"),
    ],
)
def test_experts_and_latents_of_layers_that_there_are_not_are_refused(keys, message):
    with pytest.raises(LedgerError, match=message):
        read(**keys)


def test_what_is_estimated_has_a_note():
    model = read(num_key_value_heads=None, a_novelty=3, z_loss=0.0)
    assert model.kind == "MHA 8"
    assert model.notes == (
        "num_key_value_heads is missing: taken as 8, as in multi-head attention",
        "tie_word_embeddings is missing: taken as false, the family's own",
        "not known, and left out of account: a_novelty",
    )
    mistral = read(model_type="mistral", num_key_value_heads=None)
    assert mistral.kind == "MHA 8, 4 of 4 layers see a window of 4,096"
    assert mistral.notes[0] == "sliding_window is missing: taken as 4,096, the family's own"
    gemma = read(model_type="gemma3_text", num_attention_heads=None, num_key_value_heads=None)
    assert "num_attention_heads is missing: taken as 8, the family's own" in gemma.notes
    assert "sliding_window is missing: taken as 4,096, the family's own" in gemma.notes
    hostile = read(model_type="x" * 999, **{"a\nb\x1b": 1})
    assert all(note.isprintable() and len(note) < 160 for note in hostile.notes)
    stored = read(quantization_config={"quant_method": "mxfp4"})
    assert stored.notes[-1] == "its weights are published quantised (mxfp4); counted as asked for"


def test_a_text_model_inside_another_one_is_read_alone():
    outer = {"model_type": "gemma3", "vision_config": {"hidden_size": 9}, "boi_token_index": 5}
    text = config(model_type="gemma3_text", sliding_window=16, head_dim=8)
    model = model_from_config(outer | {"text_config": text}, name="g")
    assert limits(model) == [16] * 4
    assert "only the text model; its vision and audio towers are not counted" in model.notes


def test_a_file_or_its_folder_is_read_and_named_for_the_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()))
    by_folder, by_file = load_config(folder), load_config(folder / "config.json")
    assert by_folder == by_file
    assert by_folder.name == "my-model"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"{}", "has no hidden_size"),
        (b'{"hidden_size": 1e400}', "hidden_size = inf must be a whole number"),
        (b'{"hidden_size": NaN}', "hidden_size = nan must be a whole number"),
        (b'{"hidden_size": 4, "hidden_size": 5}', "hidden_size is there twice, with different"),
        (b'{"model_type": ["llama"]}', r"model_type = \['llama'\] must be a string"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=message) as error:
        load_config(path)
    assert "\n" not in str(error.value)


def test_mixers_have_the_dims_of_their_keys():
    (latent,) = {one.mixer for one in preset("deepseek-v2").layers}
    assert latent == Latent(query_heads=128, rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    (heads,) = {one.mixer for one in preset("mistral-nemo-base-2407").layers}
    assert heads == Heads(query_heads=32, kv_heads=8, key_dim=128, value_dim=128)
