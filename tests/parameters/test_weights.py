"""Weights go from files of safetensors to the tier and back, without the model in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from families_of_transformers import classes_of
from processes import in_fork
from safetensors.torch import load_file, save_file
from torch import nn

from nvme_offload import NVMeOptimizer, Offload, UnsupportedError, UsageError
from nvme_offload.parameters import conversions, setup, weights
from nvme_offload.parameters.buckets import Division

Make = Callable[..., Offload]


class _Model(nn.Module):
    """With a tied weight, and a buffer in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.last.weight = self.first.weight
        self.between = nn.ModuleList(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(6))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for one in self.between:
            x = x + one(x.bfloat16()).float()
        return self.last(x)


@pytest.fixture
def in_memory() -> _Model:
    torch.manual_seed(0)
    model = _Model()
    model(torch.randn(4, 32))  # changes the buffers
    return model.eval()


def _on_meta() -> _Model:
    model = _Model().eval()
    kept = dict(model.named_buffers())
    model.to("meta")
    for name, buffer in kept.items():
        module = model.get_submodule(name.rpartition(".")[0])
        module._buffers[name.rpartition(".")[2]] = buffer
    model.last.weight = model.first.weight
    return model


def _saved(model: nn.Module, path: Path) -> Path:
    state = {key: value for key, value in model.state_dict().items() if key != "last.weight"}
    save_file(state, path, metadata={"format": "pt"})
    return path


def test_a_model_on_the_meta_device_gets_saved_weights(
    make: Make, in_memory: _Model, tmp_path: Path
) -> None:
    path = _saved(in_memory, tmp_path / "model.safetensors")
    for place in (path, tmp_path):
        model = _on_meta()
        weight = model.first.weight
        make().parameters(model, "cpu", weights=place)
        x = torch.randn(4, 32)
        with torch.no_grad():
            assert torch.equal(model(x), in_memory(x))
        assert model.last.weight is weight
        model(x).sum().backward()
        assert weight.grad is not None


def test_a_model_from_files_trains_like_the_model_in_memory(
    make: Make, in_memory: _Model, tmp_path: Path
) -> None:
    _saved(in_memory, tmp_path / "model.safetensors")
    model, offload = _on_meta(), make("1MB")
    offload.parameters(model, "cpu", weights=tmp_path)
    own = offload.optimizer(model.parameters(), step_in_backward=True, lr=1e-2)
    with NVMeOptimizer(
        in_memory.parameters(), paths=tmp_path, host_memory="1MB", step_in_backward=True, lr=1e-2
    ) as other:
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(4, 32)
            for each, optimizer in ((model, own), (in_memory, other)):
                each(x).square().mean().backward()
                optimizer.step()
    for one, same in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("file_bytes", [weights.FILE_BYTES, 5000])
def test_saved_weights_equal_the_state_dict(
    make: Make,
    in_memory: _Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_bytes: int,
) -> None:
    monkeypatch.setattr(weights, "FILE_BYTES", file_bytes)
    model, offload = copy.deepcopy(in_memory), make()
    offload.parameters(model, "cpu")
    with torch.no_grad():
        for each in (model, in_memory):
            for one in each.parameters():
                one.mul_(2)
    offload.save(tmp_path / "saved")
    offload.save(tmp_path / "saved")  # replaces it
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert (len(files) > 1) == (file_bytes == 5000)
    found = {key: value for file in files for key, value in load_file(file).items()}
    expected = in_memory.state_dict()
    assert found.keys() == expected.keys() - {"last.weight"}
    assert all(torch.equal(values, expected[key]) for key, values in found.items())
    again = _on_meta()
    make().parameters(again, "cpu", weights=tmp_path / "saved")
    for key, values in again.state_dict().items():
        assert torch.equal(values, expected[key])


def test_a_save_replaces_the_weights_alone(make: Make, in_memory: _Model, tmp_path: Path) -> None:
    model, offload, saved = copy.deepcopy(in_memory), make(), tmp_path / "saved"
    offload.parameters(model, "cpu")
    (saved / "of the user").mkdir(parents=True)
    kept = {"optimizer.pt": "states", "tokenizer.json": "{}", "of the user/notes": "mine"}
    for name, text in kept.items():
        (saved / name).write_text(text)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (saved / name).write_text("of a larger model")
    (tmp_path / "link").symlink_to("saved")
    offload.save(tmp_path / "link")
    found = [file for file in saved.rglob("*") if file.is_file()]
    texts = {str(file.relative_to(saved)): file for file in found}
    assert texts.pop("model.safetensors").is_file()
    assert {name: file.read_text() for name, file in texts.items()} == kept
    assert {path.name for path in tmp_path.iterdir()} >= {"saved", "link"}
    with pytest.raises(NotADirectoryError):
        offload.save(saved / "tokenizer.json")
    assert (saved / "tokenizer.json").read_text() == "{}"


def test_a_save_that_was_killed_between_two_renames_is_found(
    make: Make, in_memory: _Model, tmp_path: Path
) -> None:
    """As on NFS, which cannot exchange two names."""
    offload, saved, left = make(), tmp_path / "saved", tmp_path / ".saved.replaced"
    offload.parameters(in_memory, "cpu")
    offload.save(saved)
    saved.rename(left)
    make().parameters(_on_meta(), "cpu", weights=saved)
    assert not left.exists()
    saved.rename(left)
    offload.save(saved)
    assert not left.exists()


@pytest.mark.filterwarnings("ignore")  # transformers warns
def test_from_pretrained_reads_what_was_saved(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "DIVISION", Division(16 << 10, small_bytes=0, trainable_share=0))
    built: Any = build("gemma 2")
    model, inputs = built
    in_memory, offload = copy.deepcopy(model), make()
    offload.parameters(model, "cpu")
    place = tmp_path / "new" / "directories" / "saved"
    offload.save(place, model)
    loaded = type(model).from_pretrained(place)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, in_memory.eval()(**inputs).logits)


_SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 2}


def _experts(hf: Any) -> Any:
    """Its checkpoint has each expert apart, by other names."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES, **heads))


def _queries_keys_and_values(hf: Any) -> Any:
    """Its checkpoint has them in one tensor."""
    return hf.NomicBertModel(hf.NomicBertConfig(**_SIZES, num_attention_heads=4))


@pytest.mark.filterwarnings("ignore")  # transformers warns
@pytest.mark.parametrize("build_one", [_experts, _queries_keys_and_values])
def test_checkpoints_that_transformers_converts_are_read_and_written(
    make: Make, tmp_path: Path, build_one: Callable[[Any], Any]
) -> None:
    hf = pytest.importorskip("transformers", minversion="5")
    in_memory = build_one(hf).eval()
    in_memory.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    tokens = torch.arange(16).reshape(2, 8)
    for place in ("theirs", "ours"):
        model, offload = copy.deepcopy(in_memory), make()
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(torch.nan)
        offload.parameters(model, "cpu", weights=tmp_path / place)
        with torch.no_grad():
            assert torch.equal(model(tokens)[0], in_memory(tokens)[0]), place
        offload.save(tmp_path / "ours", model)
        theirs, ours = (
            {
                key: one
                for file in (tmp_path / which).glob("*.safetensors")
                for key, one in load_file(file).items()
            }
            for which in ("theirs", "ours")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(one, theirs[key]) for key, one in ours.items())
        assert ours.keys() != in_memory.state_dict().keys()
    again = type(in_memory).from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(again(tokens)[0], in_memory(tokens)[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers warns
def test_checkpoints_of_the_families_of_transformers_have_its_names_and_shapes() -> None:
    """One family of twelve, by its first and its last class."""
    hf = pytest.importorskip("transformers", minversion="5")
    core = pytest.importorskip("transformers.core_model_loading")
    converted = 0
    for family in sorted(hf.CONFIG_MAPPING)[::12]:
        kinds = classes_of(hf, family)
        for kind in dict.fromkeys([*kinds[:1], *kinds[-1:]]):
            try:
                config = hf.CONFIG_MAPPING[family]()
                with torch.device("meta"):
                    model = kind._from_config(config)
            except Exception:  # a model that transformers cannot build has no checkpoint
                continue
            named = dict(model.state_dict(keep_vars=True))
            inside = {name: one for one, name in {one: key for key, one in named.items()}.items()}
            parts = conversions.stored(model, inside)
            shapes = {name: part.form.shape for name, part in parts.items()}
            expected = core.revert_weight_conversion(model, inside)
            assert shapes == {name: one.shape for name, one in expected.items()}, kind
            saved = {name: part.form for name, part in parts.items()}
            found = conversions.loaded(model, named, saved)
            assert {named[name] for name in found} == set(inside.values()), kind
            assert all(part.form.shape == named[name].shape for name, part in found.items()), kind
            converted += shapes.keys() != inside.keys()
    assert converted > 5


@pytest.mark.filterwarnings("ignore")  # transformers warns
def test_a_checkpoint_of_the_model_without_its_head_is_read(make: Make, tmp_path: Path) -> None:
    """As the one of gpt2."""
    hf = pytest.importorskip("transformers", minversion="5")
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=32)
    hf.GPT2Model(config).save_pretrained(tmp_path)
    in_memory = hf.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    model = hf.GPT2LMHeadModel(config).eval()
    make().parameters(model, "cpu", weights=tmp_path)
    tokens = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens)[0], in_memory(tokens)[0])


def test_the_index_says_which_files_count(
    make: Make, in_memory: _Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory may have the same weights in another form."""
    monkeypatch.setattr(weights, "FILE_BYTES", 5000)
    saved, offload = tmp_path / "saved", make()
    offload.parameters(model := copy.deepcopy(in_memory), "cpu")
    offload.save(saved)
    for other in ("consolidated", "zzz"):
        _saved(_Model(), saved / f"{other}.safetensors")
    again = _on_meta()
    make().parameters(again, "cpu", weights=saved)
    assert all(
        torch.equal(*pair) for pair in zip(again.parameters(), model.parameters(), strict=True)
    )
    next(saved.glob("model-00002-*")).unlink()
    with pytest.raises(UsageError, match="lacks model-00002-of-"):
        make().parameters(_on_meta(), "cpu", weights=saved)
    (saved / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UsageError, match="is not an index of safetensors"):
        make().parameters(_on_meta(), "cpu", weights=saved)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_quantized_weights_are_refused(make: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    """Whose factors are in other tensors, which the model does not have."""
    model = nn.Linear(32, 32, device="meta")
    state = {"weight": torch.zeros(32, 32, dtype=dtype), "bias": torch.zeros(32)}
    save_file({**state, "weight_scale_inv": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"weight in .* dequantize the checkpoint first"):
        make().parameters(model, "cpu", weights=tmp_path)


def test_weights_of_another_model_are_refused(
    make: Make, in_memory: _Model, tmp_path: Path
) -> None:
    offload, model = make(), _on_meta()
    with pytest.raises(UsageError, match="has no file of safetensors"):
        offload.parameters(model, "cpu", weights=tmp_path)
    save_file({"first.weight": torch.zeros(32, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"does not have between.0.weight"):
        offload.parameters(model, "cpu", weights=tmp_path)
    state = {key: value for key, value in in_memory.state_dict().items() if key != "last.weight"}
    state["first.weight"] = torch.zeros(31, 32)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"first.weight has the shape \[31, 32\]"):
        offload.parameters(model, "cpu", weights=tmp_path)
    with pytest.raises(UsageError, match="give weights, or load the model first"):
        offload.parameters(model, "cpu")
    _saved(in_memory, tmp_path / "model.safetensors")
    offload.parameters(model, "cpu", weights=tmp_path)  # nothing was changed before


@pytest.mark.parametrize("damage", ["cut", "no header", "offsets", "empty"])
def test_a_damaged_file_is_refused(
    make: Make, in_memory: _Model, tmp_path: Path, damage: str
) -> None:
    path = _saved(in_memory, tmp_path / "model.safetensors")
    whole = path.read_bytes()
    start = whole.index(b"data_offsets")
    path.write_bytes(
        {
            "cut": whole[:-1],
            "no header": b"x" * 200,
            "offsets": whole[:start] + whole[start:].replace(b":[", b":[9", 1),
            "empty": b"",
        }[damage]
    )
    with pytest.raises(UsageError, match="not a whole file of safetensors"):
        make().parameters(_on_meta(), "cpu", weights=path)
    path.write_bytes(whole)
    make().parameters(_on_meta(), "cpu", weights=path)


def test_weights_of_every_dtype_are_read_as_safetensors_reads_them(
    offload: Offload, tmp_path: Path
) -> None:
    bits = torch.arange(1 << 12, dtype=torch.int64).view(torch.uint8)
    values = {
        f"of {dtype}": nn.Parameter(bits.clone().view(dtype).reshape(8, -1), requires_grad=False)
        for dtype in (torch.uint8, torch.int16, torch.float64, torch.bfloat16, torch.float8_e4m3fn)
    }
    file = tmp_path / "blobs" / "0"
    file.parent.mkdir()
    save_file({f"value.{number}": one.data for number, one in enumerate(values.values())}, file)
    (tmp_path / "model.safetensors").symlink_to(file)  # as huggingface_hub does
    model = nn.Module()
    model.value = nn.ParameterList(values.values())
    model.to("meta")
    offload.parameters(model, "cpu", weights=tmp_path)
    for key, one in model.state_dict().items():
        assert torch.equal(one.view(torch.uint8), load_file(file)[key].view(torch.uint8))


def test_parameters_that_share_memory_are_refused(offload: Offload) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UnsupportedError, match="share memory"):
        offload.parameters(model, "cpu")


@pytest.mark.parametrize("rows", [slice(0, 3), slice(30, 40), slice(32, 40), slice(20, 21)])
def test_a_buffer_in_the_memory_of_a_parameter_is_refused(offload: Offload, rows: slice) -> None:
    memory = torch.randn(100, 32)  # of which the model also has parts that do not overlap
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight.data, model[1].weight.data = memory[:32], memory[40:72]
    model.register_buffer("kept", memory[rows].t())
    model.register_buffer("wide", memory[80:81].expand(64, 32))
    if rows.start == 32:
        offload.parameters(model, "cpu")
        assert torch.equal(model.kept, memory[rows].t())
        return
    with pytest.raises(
        UnsupportedError, match=r"buffer kept shares memory with parameter 0\.weight"
    ):
        offload.parameters(model, "cpu")


def test_weights_are_converted_to_the_dtype_of_the_model(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    model = nn.Sequential(*(nn.Linear(32, 32, device="meta") for _ in range(4))).bfloat16()
    make().parameters(model, "cpu", weights=tmp_path)
    for key, values in model.state_dict().items():
        assert torch.equal(values, state[key].bfloat16())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [1, 3])
def test_weights_get_the_strides_of_the_model(
    make: Make, tmp_path: Path, device: str, size: int
) -> None:
    in_memory = nn.Conv2d(6, 8, size).to(memory_format=torch.channels_last)
    path = tmp_path / "model.safetensors"
    save_file({key: one.contiguous() for key, one in in_memory.state_dict().items()}, path)
    model = nn.Conv2d(6, 8, size, device=device).to(memory_format=torch.channels_last)
    make().parameters(model, "cpu", weights=path)
    assert torch.equal(model.weight, in_memory.weight)
    assert model.weight.stride() == in_memory.weight.stride()


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def _made(layers: int) -> nn.Module:
    """A model of *layers* of 64 MiB: malloc returns tensors above 32 MiB to the kernel."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(layers)))
    for parameter in model.to_empty(device="cpu").parameters():
        parameter.data.fill_(1)
    return model


def _take_over(place: Path) -> int:
    model = _made(6)
    before = _peak_from_here()
    Offload(place, "1GB").parameters(model, "cpu", gpu_memory="300MB")
    return before


def _save(place: Path) -> int:
    model, offload = _made(3), Offload(place, "1GB")
    offload.parameters(model, "cpu", gpu_memory="300MB")
    before = _peak_from_here()
    offload.save(place / "saved")
    return before


def _drop(place: Path) -> int:
    before = _peak_from_here()
    for _ in range(4):
        Offload(place, "1GB").parameters(_made(3), "cpu", gpu_memory="300MB")
    return before


def _peak_from_here() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return _kilobytes("VmHWM")


@pytest.mark.parametrize(
    ("program", "most"),
    [
        pytest.param(_take_over, 250, id="not twice a model of 384 MiB"),
        pytest.param(_save, 90, id="one tensor of 64 MiB in save"),
        pytest.param(_drop, 800, id="not four dropped models of 192 MiB"),
    ],
)
def test_the_peak_of_host_memory_is(
    program: Callable[[Path], int], most: int, tmp_path: Path
) -> None:
    def printed() -> None:
        before = program(tmp_path)
        print(_kilobytes("VmHWM") - before >> 10)

    ran = in_fork(printed)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) <= most, "MiB more"


def test_memory_that_the_model_frees_is_available(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    from_files = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    monkeypatch.setattr("nvme_offload.swap.tier.available_bytes", lambda: 1 << 20)
    make(host_memory="16MB").parameters(model, "cpu")
    with pytest.raises(UsageError, match="of host memory for offloaded values"):
        make(host_memory="16MB").parameters(from_files, "cpu", weights=tmp_path)


def test_save_needs_a_model_that_streams(offload: Offload, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a model whose parameters stream"):
        offload.save(tmp_path / "saved")
    with pytest.raises(UsageError, match="needs a model whose parameters stream"):
        offload.save(tmp_path / "saved", nn.Linear(2, 2))
