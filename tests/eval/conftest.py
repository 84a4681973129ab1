"""A random MLA model with a byte tokenizer, artifacts that fit it, and text."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedTokenizerFast

from rolaq.common.config import ModelConfig
from rolaq.common.models import load_model
from rolaq.eval.methods import Target
from rolaq.quant.artifact import Artifact
from rolaq.quant.methods.shaped import orthogonal_tensors
from rolaq.quant.oscar import GAIN
from rolaq.quant.response import gain
from rolaq.quant.spec import QuantizerSpec

END = "<|endoftext|>"
DOMAINS = ("books", "forum")


def byte_tokenizer():
    """One token per byte, and end-of-text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def random_model(vocabulary, seed=0):
    """Two MLA layers, d = 128, d_r = 16, fp32."""
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=2, max_position_embeddings=4096, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return DeepseekV2ForCausalLM(config).eval()


def make_artifacts(folder, identity):
    """An artifact of every kind, with random rotations."""
    spec = QuantizerSpec()
    layers, d = identity.layers, identity.latent_dim
    generator = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(layers, d, d, generator=generator, dtype=torch.float64))[0]
    start = torch.full((layers,), spec.threshold_init)
    oscar = {"rotation": rotation, "threshold": start, "gain": torch.full_like(start, GAIN)}
    learned = torch.full((layers,), 0.9)
    rolaq = {"rotation": rotation.flip(-1), "threshold": learned, "gain": gain(learned)}
    fixed = spec.model_copy(update={"gain_rule": "fixed"})
    Artifact.create("oscar", identity, fixed, oscar).save(folder / "oscar")
    chosen = {"S": 0.7, "r_512": 0.6, "r_1024": 0.8, "r_2048": 0.8, "steps": 350}
    Artifact.create("rolaq", identity, spec, rolaq, seed=42, tokens=1000, selection=chosen).save(
        folder / "rolaq"
    )
    shaped = spec.model_copy(update={"feedback_block": 32})
    sensitivity = torch.diag(torch.linspace(1, 0.01, d)).expand(layers, -1, -1)
    tensors = orthogonal_tensors(rotation, sensitivity, shaped)
    Artifact.create("rolaq-feedback", identity, shaped, tensors, seed=43).save(folder / "rolaq-feedback")


def write_text(path, seed, documents=3, sentences=60):
    """JSON lines of two domains."""
    rows = []
    for domain in DOMAINS:
        for number in range(documents):
            text = " ".join(f"{domain} {seed} says {number * k * k} and {k}." for k in range(sentences))
            rows.append({"text": text, "source": f"{seed}-{domain}-{number}", "domain": domain})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with model/, artifacts/model/{oscar,rolaq,rolaq-feedback}, data/{val,test}.jsonl."""
    root = tmp_path_factory.mktemp("workspace")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(root / "model")
    random_model(len(tokenizer)).save_pretrained(root / "model")
    (root / "data").mkdir()
    write_text(root / "data" / "val.jsonl", "val")
    write_text(root / "data" / "test.jsonl", "test")
    target = Target.of(*load(root))
    make_artifacts(root / "artifacts" / "model", target.identity)
    return root


def load(root):
    """Model settings, model and tokenizer of a workspace."""
    cfg = ModelConfig(name="model", path=str(root / "model"), device="cpu")
    return cfg, *load_model(cfg)


@pytest.fixture(scope="session")
def target(workspace):
    """The workspace's model, loaded."""
    return Target.of(*load(workspace))
