"""The tensors of a decoder by Hugging Face name, and the check that a checkpoint has all of them.

Llama's `post_attention_layernorm` is the norm before the MLP. In Gemma it is the norm after
attention, and the norms around the MLP are `pre_` and `post_feedforward_layernorm`.
"""

from collections.abc import Mapping

from jaxkv.models.config import ModelConfig
from jaxkv.models.errors import ModelError


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and the shape of every parameter of a decoder, in forward order."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.width)
    }
    for i in range(len(config.layers)):
        layer = _layer_shapes(config)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.width,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.width)
    return shapes


def check_tensors(
    config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str, config_name: str
) -> None:
    """Checks that a checkpoint has exactly the tensors of a config, with their shapes.

    An unknown tensor is refused, since a bias or a norm that is left out changes every logit.

    Args:
      config: the config.
      found: shapes by name.
      where: the checkpoint, for error messages.
      config_name: where the config came from, for error messages.

    Raises:
      ModelError: a tensor is missing, unknown or has another shape.
    """
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: has no tensor {name}, which {config_name} asks for")
        if found[name] != shape:
            raise ModelError(
                f"{where}: tensor {name} has shape {list(found[name])}, "
                f"but {config_name} asks for {list(shape)}"
            )
    for name in found:
        if name not in expected:
            raise ModelError(
                f"{where}: has a tensor {name}, which a {config.family} decoder does not use"
            )


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    attention, width = config.attention, config.width
    q = attention.num_heads * attention.head_dim
    kv = attention.num_kv_heads * attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (width, q),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (config.mlp_width, width),
        "mlp.up_proj.weight": (config.mlp_width, width),
        "mlp.down_proj.weight": (width, config.mlp_width),
    }
    if attention.qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
        }
    if attention.qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (attention.head_dim,),
            "self_attn.k_norm.weight": (attention.head_dim,),
        }
    if config.post_norms:
        shapes |= {
            "pre_feedforward_layernorm.weight": (width,),
            "post_feedforward_layernorm.weight": (width,),
        }
    return shapes
