"""A tiny random model of a family, with a random artifact: make_model.py KIND METHOD FOLDER → FOLDER/{model,artifact}."""

import json
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "quant"))
SHAPE = {
    "vocab_size": 4096, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 0, "eos_token_id": 0,
    "first_k_dense_replace": 2,
}  # fmt: skip

MINICPM3 = """
from transformers import PretrainedConfig


class MiniCPM3Config(PretrainedConfig):
    model_type = "minicpm3"
"""


def random_tensors(layers: int, method: str) -> tuple[dict, int]:
    """An artifact's tensors and its feedback_block; P with feedback is far from orthogonal, its mean far from 0."""
    from rolaq.quant.feedback import quantize_feedback
    from rolaq.quant.response import gain
    from rolaq.quant.shaping import feedback_matrix, regularise

    generator = torch.Generator().manual_seed(7)
    square = torch.randn(layers, 256, 256, generator=generator, dtype=torch.float64)
    rotation, threshold = torch.linalg.qr(square).Q, torch.linspace(0.8, 1.1, layers)
    tensors = {"rotation": rotation, "threshold": threshold, "gain": gain(threshold)}
    if method == "rolaq":
        return tensors, 0
    scale = torch.logspace(-0.3, 0.3, 256, dtype=torch.float64)
    feedback = quantize_feedback(feedback_matrix(regularise(square @ square.mT, 1.0), 32))
    return tensors | {
        "rotation": scale[:, None] * rotation,
        "inverse": rotation.mT / scale,
        "mean": 0.3 * torch.randn(layers, 256, generator=generator),
        "feedback": feedback.weight,
        "feedback_unit": feedback.unit,
    }, 32


def main(kind: str, method: str, folder: Path) -> None:
    from tiny_models import tiny

    from rolaq.quant.adapters.layers import find_mla_layers
    from rolaq.quant.artifact import Artifact
    from rolaq.quant.identity import model_identity
    from rolaq.quant.spec import QuantizerSpec

    model = tiny(kind, **SHAPE)
    model.save_pretrained(folder / "model")
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text()) | {"moe_layer_freq": 1}
    if kind == "minicpm3":  # its config comes with the checkpoint: SGLang's Transformers does not know it
        config["auto_map"] = {"AutoConfig": "configuration_minicpm3.MiniCPM3Config"}
        (folder / "model" / "configuration_minicpm3.py").write_text(MINICPM3)
    path.write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "testbed" / "tiny" / file, folder / "model")
    layers = find_mla_layers(model)
    tensors, block = random_tensors(len(layers), method)
    identity, spec = model_identity(layers, model.config, kind), QuantizerSpec(feedback_block=block)
    Artifact.create(method, identity, spec, tensors).save(folder / "artifact")


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]))
