"""The whole path on what a real model caches: rotate, quantize, store, decode, on the testbed's latents."""

from importlib.resources import files

import pytest
import torch

from rolaq.kernels.decode import decode
from rolaq.kernels.reference import decode_reference, unpack_rows, write_reference
from rolaq.kernels.write import split_rotation, write
from rolaq.quant.geometry import projections
from rolaq.quant.hadamard import block_hadamard

transformers = pytest.importorskip("transformers")
TOKENS = 150


@pytest.fixture(scope="module")
def captured():
    """Latents, RoPE keys and absorbed queries `[n, …]` of the last layer on a stretch of text."""
    from rolaq.quant.adapters.layers import find_mla_layers

    folder = str(files("rolaq.testbed") / "tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layer = find_mla_layers(model)[-1]
    module, seen = layer.module, {}
    for name in ("kv_a_layernorm", "kv_a_proj_with_mqa", "q_proj"):
        getattr(module, name).register_forward_hook(
            lambda _m, _i, out, name=name: seen.update({name: out[0]})
        )
    ids = torch.arange(TOKENS)[None] * 37 % model.config.vocab_size
    with torch.no_grad():
        model(ids)
    keys = projections(layer)[0].float().unflatten(0, (layer.heads, -1))  # [H, nope, d]
    q_nope, q_rope = (
        seen["q_proj"].unflatten(-1, (layer.heads, -1)).split([layer.nope_dim, layer.rope_dim], -1)
    )
    queries = torch.einsum("nhk,hkd->nhd", q_nope, keys.to(q_nope))
    rope = seen["kv_a_proj_with_mqa"][:, layer.latent_dim :]
    return seen["kv_a_layernorm"].detach(), rope.detach(), queries.detach(), q_rope.detach()


def test_decode_over_captured_latents(captured, device):
    latents, rope, queries, q_rope = (x.to(device) for x in captured)
    n, d, d_r = len(latents), latents.shape[-1], rope.shape[-1]
    rotation = block_hadamard(d, 128).float().to(device)
    rows = torch.zeros(n, d // 4 + 2 * d_r + d // 16, dtype=torch.uint8, device=device)
    slots = torch.randperm(n).int().to(device)
    write(
        latents.bfloat16(), rope.bfloat16(), split_rotation(rotation), slots, rows, threshold=0.93, gain=1.09
    )
    want_rows, _ = write_reference(latents.bfloat16(), rope.bfloat16(), rotation, threshold=0.93, gain=1.09)
    got, want = (unpack_rows(x, d, d_r)[0] for x in (rows[slots.long()], want_rows))
    assert ((got - want).abs() > 1e-4 * want.abs().max()).float().mean() < 1e-3
    arguments = {
        "q": (queries[-1:] @ rotation)[None].bfloat16(),
        "q_rope": q_rope[None, -1:].bfloat16(),
        "rows": rows,
        "page_table": slots[None],
        "lengths": torch.tensor([n], dtype=torch.int32, device=device),
        "page_size": 1,
        "scale": (queries.shape[-1] / 4 + d_r) ** -0.5,
    }
    want, want_lse = decode_reference(**arguments)
    out = torch.empty_like(want, dtype=torch.bfloat16 if want.is_cuda else torch.float32)
    _, lse = decode(**arguments, out=out)
    assert (lse - want_lse).abs().max() <= 1e-3
    assert (out.float() - want).norm() <= 3e-3 * want.norm()
