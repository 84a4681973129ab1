"""Tiny random MLA models of many architectures, built from their configs alone, and a method for them."""

import inspect
from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

WIDTH = 128
# Older releases call the cache otherwise, or cache no latents: test_older_transformers.py is for them.
current = pytest.mark.skipif(
    "cache" not in inspect.signature(DeepseekV3Attention.forward).parameters,
    reason="written for a transformers that calls the cache `cache`",
)
COMMON = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": WIDTH,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SPARSE = {**MOE, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
HYBRID = {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}
CONFIGS = {
    "deepseek_v2": {**MOE, "head_dim": 16, "topk_method": "greedy"},
    "deepseek_v3": MOE,
    "minicpm3": {"scale_emb": 1, "tie_word_embeddings": False},
    "glm4_moe_lite": MOE,
    "youtu": {},
    "axk1": MOE,
    "mistral4": {
        **MOE,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "longcat_flash": {
        "num_layers": 1,
        "head_dim": 16,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "kimi_linear": {**MOE, **HYBRID},
    "bailing_hybrid": {**MOE, **HYBRID},
    "deepseek_v32": SPARSE,
    "axk2": SPARSE,
    "glm_moe_dsa": {**SPARSE, "indexer_types": ["full", "shared"]},
    "hy_v4": {**SPARSE, "indexer_types": ["full", "shared"]},
    "glm5_next_text": {
        **SPARSE,
        **LINEAR,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full"],
        "mlp_layer_types": ["dense", "sparse"],
        "qk_rope_head_dim": 0,
        "index_kpool": 2,
        "hc_mult": 2,
    },
    "mistral_large4_text": {
        **SPARSE,
        "num_hidden_layers": 4,
        "kv_source_layers": [0, 0, 2, 2],
        "no_rope_layers": [1, 1, 0, 0],
        "indexer_types": ["full", "full", "full", "shared"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "dots3_note_text": {
        **SPARSE,
        "num_hidden_layers": 3,
        "head_dim": 40,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 7,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 48,
        "swa_kv_lora_rank": 2 * WIDTH,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 24,
        "swa_v_head_dim": 20,
        "shared_experts_intermediate_size": 32,
    },
}
CONFIGS = {kind: config for kind, config in CONFIGS.items() if kind in CONFIG_MAPPING}
EAGER_ONLY = {"hy_v4"}


@cache
def tiny(kind, attention=None, dtype=torch.float32, **changes):
    """A frozen model in eval mode. Shared between tests: alter nothing."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **CONFIGS[kind], **changes})
    family = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    attention = attention or ("eager" if kind in EAGER_ONLY else "sdpa")
    model = family.from_config(config, attn_implementation=attention, experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:  # attention that is less flat than the usual initialisation gives
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "layernorm" in name:
                parameter.uniform_(0.6, 1.4)
    return model.requires_grad_(False).to(dtype)


def tokens(*shape, seed=1):
    """Random ids that are neither padding nor special."""
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))


def result(output):
    """The part of a model's output to compare: logits, or hidden states of a model without a head."""
    return output["logits"] if "logits" in output else output["last_hidden_state"]


class Wobble:
    """A smooth stand-in for a method: every coordinate is scaled by its position and bent.

    Smooth, so that rounding noise between two ways to the same result stays small; dependent on the position, so that
    a wrong `start` shows. Keeps a record of what it was shown.
    """

    name, exact = "wobble", False

    def __init__(self, strength=0.4):
        self.strength, self.events = strength, []

    def reconstruct(self, latent, layer, *, start=0, valid=None):
        n = latent.shape[1]
        self.events.append((layer, start, n, valid))
        return self.at(latent, torch.arange(start, start + n), layer)

    def at(self, latent, position, layer):
        """What a latent at a position becomes."""
        phase = (0.7 * position + layer).cos().to(latent.dtype)[..., None]
        return latent * (1 + self.strength * phase) - 0.3 * latent.roll(1, -1).tanh()
