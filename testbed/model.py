"""The two model sizes, and a forward pass for training that compiles well."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from rolaq.testbed.data import END_OF_TEXT_ID

CONTEXT = 2048

SIZES = {
    "tiny": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "small": {
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "intermediate_size": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


def make_config(size: str, vocabulary: int) -> DeepseekV2Config:
    """Dense DeepSeek-V2 configuration of a size; `ValueError` for an unknown one."""
    if size not in SIZES:
        raise ValueError(f"Unknown size {size!r}. Available: {', '.join(SIZES)}")
    shape = SIZES[size]
    return DeepseekV2Config(
        **shape,
        vocab_size=vocabulary,
        num_key_value_heads=shape["num_attention_heads"],
        first_k_dense_replace=shape["num_hidden_layers"],
        q_lora_rank=None,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )


def make_model(size: str, vocabulary: int) -> DeepseekV2ForCausalLM:
    """A freshly initialised FP32 model; residual outputs start smaller by sqrt(2 layers)."""
    model = DeepseekV2ForCausalLM(make_config(size, vocabulary))
    scale = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    model.generation_config.pad_token_id = END_OF_TEXT_ID
    return model


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of interleaved pairs: x [..., T, d_r], cos and sin FP32 [T, d_r / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return pairs.flatten(-2).to(x.dtype)


class TrainingForward(nn.Module):
    """Losses of a `DeepseekV2ForCausalLM`, computed with its own modules.

    Same function as the model's forward pass; it differs in two ways that matter for
    speed: rotation in real numbers (complex ones do not compile) and values padded to
    the width of the keys (flash attention wants one head width).
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, model: DeepseekV2ForCausalLM) -> None:
        super().__init__()
        self.model = model
        config = model.config
        steps = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float)
        frequencies = config.rope_parameters["rope_theta"] ** (-steps / config.qk_rope_head_dim)
        angles = torch.outer(torch.arange(CONTEXT, dtype=torch.float), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self, ids: torch.Tensor, answers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean losses (FP32 scalars) over text, over answers and over what surrounds these.

        `ids` int [B, T + 1]; `answers` bool [A, T + 1] marks the answer tokens of the
        last A rows.
        """
        logits = self.logits(ids[:, :-1])
        targets = ids[:, 1:].long()
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(
            targets
        )
        rows = ids.shape[0] - answers.shape[0]
        asked = answers[:, 1:].float()
        answer_loss = (losses[rows:] * asked).sum() / asked.sum().clamp(min=1)
        prompt_loss = (losses[rows:] * (1 - asked)).sum() / (1 - asked).sum().clamp(min=1)
        return losses[:rows].mean(), answer_loss, prompt_loss

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocabulary] of ids int [B, T]."""
        x = self.model.model.embed_tokens(ids)
        for layer in self.model.model.layers:
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(self.model.model.norm(x))

    def _attend(self, attention: Any, x: torch.Tensor) -> torch.Tensor:
        config = self.model.config
        nope, rope, width = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        heads, length = config.num_attention_heads, x.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]

        q = attention.q_proj(x).unflatten(-1, (heads, nope + rope)).transpose(1, 2)
        q_nope, q_rope = q.split((nope, rope), dim=-1)
        latent, k_rope = attention.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, rope), dim=-1)
        kv = attention.kv_b_proj(attention.kv_a_layernorm(latent))
        k_nope, v = kv.unflatten(-1, (heads, nope + width)).transpose(1, 2).split((nope, width), -1)
        k_rope = rotate(k_rope, cos, sin)[:, None].expand(-1, heads, -1, -1).to(k_nope.dtype)

        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        v = F.pad(v, (0, nope + rope - width))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :width]
        return attention.o_proj(out.transpose(1, 2).flatten(2))
