"""A tiny random MLA model with the testbed's tokenizer, and text to calibrate it on."""

import json
import random
from importlib.resources import files

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV2Config, DeepseekV2ForCausalLM

from rolaq.calib.config import CalibConfig, QuantConfig, ValidationConfig
from rolaq.calib.student import Student
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.geometry import energies
from rolaq.quant.hadamard import block_hadamard
from rolaq.quant.rotation import build_rotation

LATENT, LAYERS, VOCABULARY = 128, 2, 4097
TOKENIZER = files("rolaq.testbed") / "tiny"


def build_model(seed=0, **changes):
    """Random weights, large enough that attention and predictions are far from uniform."""
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=128,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        vocab_size=VOCABULARY,
        first_k_dense_replace=LAYERS,
        q_lora_rank=None,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**(shape | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def model():
    return build_model()


@pytest.fixture(scope="session")
def make_model():
    """The function that builds the model of these tests, of another seed or shape."""
    return build_model


@pytest.fixture(scope="session")
def layers(model):
    return find_mla_layers(model)


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER)


@pytest.fixture
def make_student(layers):
    """A student on a block Hadamard; settings as in `QuantConfig`."""

    def make(**settings):
        config = QuantConfig(**settings)
        base = block_hadamard(LATENT, 128).expand(LAYERS, -1, -1).contiguous()
        return Student(build_rotation(config.rotation, base, energies(layers)), LAYERS, config)

    return make


@pytest.fixture
def make_config():
    """Calibration settings small enough for a test."""

    def make(validation=None, **settings):
        small = dict(steps=4, tokens_per_step=128, lengths=(32, 64, 128), fit_tokens=512, skip=4, chunk=50)
        checks = ValidationConfig(**(dict(every=2, documents=2, batch_tokens=128) | (validation or {})))
        return CalibConfig(**(small | settings), validation=checks)

    return make


def write_text(folder, name, documents, seed):
    """A JSONL file of random sentences in two domains."""
    draw = random.Random(seed)
    words = [
        "the",
        "cache",
        "holds",
        "a",
        "latent",
        "for",
        "every",
        "token",
        "of",
        "river",
        "stone",
        "paper",
        "green",
        "and",
        "seven",
        "or",
        "often",
        "no",
    ]
    path = folder / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            text = " ".join(draw.choice(words) for _ in range(150))
            file.write(json.dumps({"text": text, "domain": ("a", "b")[number % 2]}) + "\n")
    return str(path)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Paths of fit, train and val files without a common document."""
    folder = tmp_path_factory.mktemp("text")
    sizes = {"fit": 8, "train": 24, "val": 12}
    return {name: write_text(folder, name, size, seed) for seed, (name, size) in enumerate(sizes.items())}


@pytest.fixture(scope="session")
def model_folder(model, tokenizer, tmp_path_factory):
    """The tiny model saved as a user would have it."""
    folder = tmp_path_factory.mktemp("models") / "toy"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def overrides(model_folder, text):
    """Command-line arguments of a calibration that takes a second; the folder is still to be given."""
    return [
        "model=auto",
        f"model.path={model_folder}",
        "model.context=128",
        "data=local",
        "data.root=unused",
        *(f"data.{name}=[{path}]" for name, path in text.items()),
        "data.test=[]",
        "tracking=none",
        "calib.steps=5",
        "calib.tokens_per_step=128",
        "calib.fit_tokens=512",
        "calib.validation.every=2",
        "calib.validation.documents=2",
        "calib.lr_rotation=0.02",
    ]
