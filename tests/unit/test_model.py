"""The size of a model: from its name, its config, or the model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import Any

import pytest
import torch
from families_of_transformers import classes_of

from nvme_offload.commands import cli
from nvme_offload.commands.config_json import model_of
from nvme_offload.errors import UsageError
from nvme_offload.planning.model import of_count, of_module

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def gated(
    kind: str, hidden: int, layers: int, heads: int, inner: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary}
    counts = {"num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": kind, **sizes, **counts, **others}


QWEN3 = {"num_key_value_heads": 8, "attention_bias": False}
# Published models and their parameters.
PUBLISHED: list[tuple[int, dict[str, Any]]] = [
    (6_738_415_616, gated("llama", 4096, 32, 32, 11008, 32000, tie_word_embeddings=False)),
    (8_030_261_248, gated("llama", 4096, 32, 32, 14336, 128256, num_key_value_heads=8)),
    (7_241_732_096, gated("mistral", 4096, 32, 32, 14336, 32000)),
    (46_702_792_704, gated("mixtral", 4096, 32, 32, 14336, 32000)),
    (7_615_616_512, gated("qwen2", 3584, 28, 28, 18944, 152064, num_key_value_heads=4)),
    (8_190_735_360, gated("qwen3", 4096, 36, 32, 12288, 151936, head_dim=128, **QWEN3)),
    (2_506_172_416, gated("gemma", 2048, 18, 8, 16384, 256000, num_key_value_heads=1)),
    (3_821_079_552, gated("phi3", 3072, 32, 32, 8192, 32064)),
    (
        124_439_808,
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
    ),
    (
        1_315_758_080,
        {
            "model_type": "opt",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "ffn_dim": 8192,
            "vocab_size": 50272,
        },
    ),
    (
        20_554_567_680,
        {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "intermediate_size": 24576,
            "vocab_size": 50432,
        },
    ),
    (
        7_069_016_064,
        {"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "vocab_size": 250880},
    ),
]


@needs_transformers
@pytest.mark.parametrize(
    ("parameters", "config"), PUBLISHED, ids=[config["model_type"] for _, config in PUBLISHED]
)
def test_a_config_tells_the_published_number_of_parameters(tmp_path, parameters, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = model_of(tmp_path)
    assert found.parameters == parameters
    assert found.largest_parameter <= found.largest_layer < parameters
    assert (found.layers, found.hidden, found.vocabulary, found.assumed) == (
        config.get("num_hidden_layers") or config["n_layer"],
        config.get("hidden_size") or config["n_embd"],
        config["vocab_size"],
        False,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'no "model_type"'),
        ('{"model_type": ["llama"]}', "it is not a Hugging Face model config"),
    ],
)
def test_a_config_that_tells_nothing_is_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        model_of(tmp_path / "config.json")


def test_a_config_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        model_of(tmp_path)


def test_the_named_file_is_sized_whatever_is_next_to_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 1000, "head_dim": 16}
    named = tmp_path / "gemma2.json"
    named.write_text(json.dumps({"model_type": "gemma2", **shape}))
    alone = model_of(named)
    with torch.device("meta"):
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape))
    assert alone.parameters == of_module(model).parameters
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert model_of(named) == alone


def test_a_quantized_model_is_sized_without_its_quantization(tmp_path):
    _, config = PUBLISHED[0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = model_of(tmp_path)
    config = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = f"{plain.source}, without its quantization"
    assert model_of(tmp_path) == dataclasses.replace(plain, source=source)


def meta(transformers: Any, config: Any, name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return getattr(transformers, name)._from_config(config)


TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1000}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ODD: dict[str, tuple[str, str, dict[str, Any]]] = {
    # experts, of which a token uses some; an encoder and a decoder; shared and separate embeddings;
    # several models in one; another head than a language model's; a vision model
    "experts": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**TINY, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "encoder-decoder": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 1000,
        },
    ),
    "tied": ("Qwen2Config", "Qwen2ForCausalLM", {**TINY, "tie_word_embeddings": True}),
    "untied": ("Qwen2Config", "Qwen2ForCausalLM", {**TINY, "tie_word_embeddings": False}),
    "text and vision": (
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **TINY},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
    ),
    "classifier": ("LlamaConfig", "LlamaForSequenceClassification", {**TINY, "num_labels": 7}),
    "bare": ("LlamaConfig", "LlamaModel", TINY),
    "vision": (
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_models_are_counted_as_transformers_makes_them(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    config_class, name, shape = ODD[kind]
    config = getattr(transformers, config_class)(**shape)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    found = model_of(tmp_path)
    wanted = of_module(meta(transformers, config, name))
    assert found == dataclasses.replace(wanted, source=found.source)
    if kind == "experts":
        each = 3 * 64 * 32  # gate, up and down of an expert, six of eight of which idle in 2 layers
        assert found.idle == 2 * 6 * each
    else:
        assert found.idle == 0
    if kind == "text and vision":
        assert (found.layers, found.hidden, found.vocabulary) == (2, 64, 1000)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[" * 100_000,
        '"llama"',
        "\xff",
        '{"model_type": "llama", "hidden_size": "4096"}',
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 128, '
        '"num_hidden_layers": 1, "vocab_size": 9, "intermediate_size": 9}',
        '{"model_type": "gemma2", "hidden_size": "wide"}',
        '{"model_type": "gemma2", "num_hidden_layers": -1, "hidden_size": -64}',
        '{"model_type": "t5", "d_model": null, "num_heads": "many"}',
        '{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForPoetry"]}',
        '{"model_type": "llama", "architectures": ["LlamaForPoetry"]}',
        '{"model_type": "no family"}',
        '{"model_type": "clip", "text_config": "none"}',
    ],
)
def test_a_config_that_is_no_model_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, text):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    command = ["nvme-offload", "plan", "--model", str(tmp_path), "--gpu", "L4"]
    monkeypatch.setattr("sys.argv", command)
    assert cli.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nvme-offload: ")
    assert said.err.count("\n") == 1


# Not covered by the sweep below, with transformers 5: classes whose default configuration makes no
# model (transformers raises), and classes that need additional packages, such as
# timm, scipy or detectron2. Base classes without parameters are no models.
@pytest.mark.slow
def test_families_of_transformers_are_counted(tmp_path):
    """One of sixteen, by its first class, which is the model without a head in most files, and its last
    one: `model_of` makes each as the test does, and knows no family.
    """
    transformers = pytest.importorskip("transformers")
    families = sorted(transformers.CONFIG_MAPPING)[::16]
    counted, wrong, not_built = 0, [], []
    for family in families:
        kinds = classes_of(transformers, family)
        for kind in dict.fromkeys([*kinds[:1], *kinds[-1:]]):
            try:
                config = transformers.CONFIG_MAPPING[family]()
                with torch.device("meta"):
                    parameters = {id(each): each for each in kind._from_config(config).parameters()}
            except Exception as error:  # a model that transformers cannot build cannot be counted
                not_built.append(f"{kind.__name__}: {error}")
                continue
            wanted = sum(each.numel() for each in parameters.values())
            if not wanted:
                continue
            described = {**config.to_dict(), "architectures": [kind.__name__]}
            (tmp_path / "config.json").write_text(json.dumps(described))
            try:
                found = model_of(tmp_path).parameters
            except UsageError as error:
                wrong.append(f"{kind.__name__}: {error}")
                continue
            counted += 1
            if found != wanted:
                wrong.append(f"{kind.__name__}: {found}, and it has {wanted}")
    assert wrong == []
    assert counted > 4 * len(not_built), not_built


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7e9),
        ("1.5b", 1.5e9),
        ("350M", 350e6),
        ("1300000000", 1.3e9),
        (" 2 T ", 2e12),
        ("100", 100),
    ],
)
def test_a_count_is_read_and_given_a_usual_shape(text, count):
    found = of_count(text)
    assert (found.parameters, found.assumed) == (count, True)
    assert 0 < found.largest_parameter <= found.parameters


def test_the_usual_shape_is_near_that_of_known_models():
    found = of_count("7B")
    assert (found.layers, found.largest_layer) == (32, pytest.approx(131_072_000, rel=0.1))


@pytest.mark.parametrize("text", ["", "0", "-1", "7 billion", "7BB", "B", "1e9x"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(UsageError, match="not a number of parameters"):
        of_count(text)


def test_a_module_is_counted_with_what_it_shares_once():
    embedding, head = (
        torch.nn.Embedding(10, 4, device="meta"),
        torch.nn.Linear(4, 10, bias=False, device="meta"),
    )
    head.weight = embedding.weight
    found = of_module(torch.nn.Sequential(embedding, torch.nn.Linear(4, 4, device="meta"), head))
    assert (found.parameters, found.largest_layer, found.largest_parameter, found.source) == (
        60,
        40,
        40,
        "Sequential",
    )


def test_a_module_partitioned_by_zero3_is_counted_whole():
    module = torch.nn.Linear(4, 5, bias=False)
    module.weight.ds_numel = 20  # type: ignore[assignment]
    module.weight.data = torch.empty(0)
    assert of_module(module).parameters == 20


def test_a_module_without_parameters_is_refused():
    with pytest.raises(UsageError, match="ReLU has no parameters"):
        of_module(torch.nn.ReLU())
