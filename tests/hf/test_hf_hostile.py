"""Checkpoints that somebody made to do harm: they are refused in one line that names the file, at once."""

import json
import os
import shutil
import struct
import time
import tracemalloc

import hf_checkpoints
import pytest

from gdn_jax.commands import cli
from gdn_jax.commands.errors import RunError
from gdn_jax.hf import load_hf, save_hf
from gdn_jax.hf.text import Tokenizer
from gdn_jax.inspect.info import InfoOptions, info


def shown(folder):
    """What `gdn info` prints of a checkpoint."""
    from rich.console import Console

    console = Console(width=120, record=True, file=open(os.devnull, "w"))
    info(folder, InfoOptions(), console)
    return console.export_text()


@pytest.mark.parametrize(
    "fields",
    [
        dict(hidden_size=10**9),
        dict(linear_num_value_heads=10**9),
        dict(linear_key_head_dim=10**9),
        dict(vocab_size=10**30),
        dict(num_attention_heads=2**40),
        dict(num_hidden_layers=10**8, layer_types=None),
        dict(num_hidden_layers=10**30, layer_types=None),
        dict(rms_norm_eps=float("inf")),
        dict(layer_types=[["linear_attention"], {}]),
        dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=float("inf"))),
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("reads", [load_hf, shown], ids=["load_hf", "info"])
def test_sizes_take_no_memory(fields, reads, tmp_path):
    """A config of a few kB takes a few MB, whatever it says."""
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    hf_checkpoints.change_config(folder, **fields)
    tracemalloc.start()
    with pytest.raises((ValueError, NotImplementedError, RunError), match=r"config.json|tensor"):
        reads(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6


HUGE = 10**400  # more than a float holds


@pytest.mark.parametrize(
    "checkpoint, fields, message",
    [
        (
            "kimi_linear_released",
            dict(routed_scaling_factor=HUGE),
            "routed_scaling_factor that a float holds",
        ),
        ("bailing_hybrid_released", dict(kda_lower_bound=-HUGE), "kda_lower_bound that a float holds"),
        ("bailing_hybrid_released", dict(architectures=5), "architectures of type list or NoneType, got 5"),
        (
            "olmo_hybrid_released",
            dict(rope_parameters=dict(rope_theta=HUGE)),
            "rope_theta that a float holds",
        ),
        ("olmo_hybrid_released", dict(hidden_size=HUGE), "hidden_size below 2147483648"),
        (
            "qwen3_next",
            dict(rope_parameters=dict(partial_rotary_factor=HUGE)),
            "partial_rotary_factor that a",
        ),
        (
            "qwen3_next",
            dict(rope_parameters=dict(partial_rotary_factor=1e308)),
            "partial_rotary_factor from 0",
        ),
        ("qwen3_next", dict(rms_norm_eps=-1.0), "norm_eps: expected a positive number, got -1.0"),
        ("qwen3_next", dict(num_experts=0, mlp_only_layers=[[]]), "numbers of layers mlp_only_layers, got"),
        ("lara_mini", dict(linear_value_head_dim=HUGE), "linear_value_head_dim below 2147483648"),
        ("lara_mini", dict(layer_types=["x" * 10**5]), r"expected \d+ layer_types, got \['x+\.\.\.$"),
    ],
)
def test_numbers_that_no_float_holds(checkpoint, fields, message, tmp_path):
    """Errors name file and field, and are no longer than a few lines."""
    folder = hf_checkpoints.copy(checkpoint, tmp_path)
    hf_checkpoints.change_config(folder, **fields)
    with pytest.raises(ValueError, match=f"config.json: .*{message}") as raised:
        load_hf(folder)
    assert len(str(raised.value)) < 600


def with_tensors(folder, more):
    """Adds tensors of these shapes, of no bytes each, to the file of a checkpoint: to its header, that is."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    end = len(content) - 8 - length
    for name, shape in more.items():
        header[name] = {"dtype": "F32" if 0 in shape else "F4", "shape": shape, "data_offsets": [end, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


MANY = {f"mtp.{i}": [0] for i in range(20_000)}


@pytest.mark.parametrize(
    "checkpoint, fields, more",
    [
        ("qwen3_5_moe", dict(num_experts=10**9), {}),
        ("qwen3_next", dict(num_experts=10**7), {"mtp.z": [10**7, 0]}),
        ("qwen3_next", dict(num_experts=10**9), {"mtp.z": [10**9, 1]}),
        ("kimi_linear_released", dict(num_experts=10**7, n_group=1), {"mtp.z": [10**7, 0]}),
        ("kimi_linear_released", dict(num_experts=5000), {}),
        ("qwen3_5", dict(num_hidden_layers=20_000, layer_types=None, full_attention_interval=4), MANY),
        ("bailing_hybrid_released", dict(num_nextn_predict_layers=10**9), MANY | {"odd": [0]}),
        ("qwen3_next", dict(mlp_only_layers=[-1] * 20_000), MANY),
    ],
    ids=["experts", "empty", "no bytes", "separate", "fewer bytes", "layers", "nextn", "dense"],
)
def test_tensors_without_bytes_excuse_nothing(checkpoint, fields, more, tmp_path):
    """There are no more layers, experts and parts that are left out than bytes, and no names made of the rest."""
    folder = hf_checkpoints.copy(checkpoint, tmp_path)
    hf_checkpoints.change_config(folder, **fields)
    with_tensors(folder, more)
    tracemalloc.start()
    begin = time.process_time()
    for reads in (load_hf, shown):
        with pytest.raises((ValueError, RunError), match=r"config\.json: |expected (no )?tensor"):
            reads(folder)
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 10 and peak < 100e6


@pytest.mark.parametrize(
    "place",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        ".",
        "x" * 5000,
        "é" * 200,
        "\ud800",
        "a\0b",
    ],
    ids=ascii,
)
def test_an_index_names_files_of_its_folder(place, tmp_path):
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    shutil.copyfile(folder / "model.safetensors", tmp_path / "secret.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="in a file of this folder"):
        load_hf(folder)


def test_shapes_take_no_time(tmp_path):
    """To multiply a thousand numbers of thousands of digits would take minutes."""
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    for shape in ([10**4000] * 3, [1] * 1000, [True, 3]):
        text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
        with pytest.raises(
            ValueError, match="expected dtype, shape and data_offsets of tensor a, got "
        ) as raised:
            load_hf(folder)
        assert len(str(raised.value)) < 600


def test_links_that_leave_the_folder_are_not_copied(tmp_path):
    """A secret does not get into the folder that is published; the links of the hub's cache do."""
    secret = tmp_path / "id_ed25519"
    secret.write_text("TOP SECRET")
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    (folder / "chat_template.jinja").symlink_to(secret)
    model = load_hf(folder)
    with pytest.raises(ValueError, match=r"chat_template.jinja.*got a link to"):
        save_hf(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists() and not (tmp_path / "saved.tmp").exists()

    (folder / "chat_template.jinja").unlink()
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        model = load_hf(folder)  # to read it is no harm
        with pytest.raises(ValueError, match=rf"{name}, whose content is written.*got a link to {tmp_path}"):
            save_hf(model, tmp_path / "saved")
        (folder / name).unlink()
        (tmp_path / name).rename(folder / name)
    assert not (tmp_path / "saved").exists() and not (tmp_path / "saved.tmp").exists()

    cache = tmp_path / "models--ours--tiny"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir()
    for i, file in enumerate(hf_checkpoints.FOLDER.joinpath("qwen3_5").iterdir()):
        shutil.copyfile(file, cache / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    save_hf(load_hf(snapshot), tmp_path / "saved")
    assert (tmp_path / "saved" / "generation_config.json").is_file()


def test_what_a_killed_save_left_is_named(tmp_path, no_type_checks):
    model = load_hf(hf_checkpoints.FOLDER / "qwen3_5")
    (tmp_path / "saved.tmp").mkdir()
    with pytest.raises(ValueError, match=r"saved.tmp: another save_hf writes there, or one was killed"):
        save_hf(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="max_file_bytes: expected a whole number"):
        save_hf(model, tmp_path / "other", max_file_bytes=float("nan"))


DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "header"])
def test_deep_json(file, tmp_path):
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    if file == "header":
        text = DEEP.encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    else:
        if file != "config.json":
            (folder / "model.safetensors").unlink()
        (folder / file).write_text(DEEP)
    with pytest.raises(ValueError, match="nested too deep"):
        load_hf(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_pipes_and_devices_are_not_read(file, tmp_path):
    folder = hf_checkpoints.copy("qwen3_5", tmp_path)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(ValueError, match=r"config.json|safetensors"):
        load_hf(folder)
    (folder / file).unlink()
    (folder / file).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"config.json|safetensors"):
        load_hf(folder)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPECIAL = {"SpecialToken": {"id": "a", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [SPECIAL] * 1000, "pair": []}
TWICE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": []}


@pytest.mark.parametrize(
    "part, value, message",
    [
        (
            "normalizer",
            {"type": "Sequence", "normalizers": [REPLACE] * 60},
            "normalizer that makes a text at most",
        ),
        ("decoder", {"type": "Sequence", "decoders": [REPLACE] * 60}, "decoder that makes a text at most"),
        (
            "normalizer",
            REPLACE | {"pattern": {"Regex": "x*"}, "content": "é" * 501},
            r"normalizer that makes a text at most 1000 times longer, got 1e\+03",
        ),
        (
            "post_processor",
            TEMPLATE | {"special_tokens": {"a": {"id": "a", "ids": [1] * 1000, "tokens": ["a"] * 1000}}},
            "post_processor that adds at most 1000 tokens, got 1000000",
        ),
        (
            "post_processor",
            {"type": "Sequence", "processors": [TWICE | {"special_tokens": {}}] * 60},
            "post_processor that makes a text at most",
        ),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False},
            "tokenizer of any text, got one that fails: PanicException",
        ),
        (
            "model",
            {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"},
            "one that fails: Exception: WordLevel",
        ),
        ("model", {"type": "WordLevel", "vocab": {"a": 2**32}, "unk_token": "a"}, "damaged file: ValueError"),
        (
            "model",
            {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"},
            "below the vocabulary's size 9",
        ),
        (
            "model",
            {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.5},
            "dropout = 0.5: tokens that are",
        ),
    ],
)
def test_tokenizers_that_do_harm(part, value, message, tmp_path, capfd):
    """What would draw at random, fail or take the machine's memory is an error that names the file."""
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    model = {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "a"}
    content = {"version": "1.0", "added_tokens": [], "model": model, part: value}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises((ValueError, NotImplementedError), match=f"tokenizer.json: .*{message}"):
        Tokenizer(tmp_path / "tokenizer.json", 9).encode("x" * 40)


def test_a_tokenizer_is_an_ordinary_file(tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    file = tmp_path / "tokenizer.json"
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"tokenizer.json: expected a tokenizer, .*: not a regular file"):
        Tokenizer(file, 9)
    for content in (DEEP, "[]", "null", '{"model": 3}'):
        file.unlink()
        file.write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer.json: expected a tokenizer, got a damaged file: "):
            Tokenizer(file, 9)


def test_names_are_no_markup(tmp_path):
    """A path with brackets is printed as it is, and a terminal obeys no name of a tensor."""
    folder = hf_checkpoints.copy("qwen3_5", tmp_path / "a[/b]")
    with_tensors(folder, {"mtp.\x1b]0;pwned\x07": [0]})
    text = shown(folder)
    assert "a[/b]" in text and "mtp.\\x1b]0;pwned\\x07" in text


def test_a_cache_fits_into_memory(tmp_path, capsys):
    folder = hf_checkpoints.copy("lara_mini", tmp_path)
    hf_checkpoints.change_config(folder, sliding_window=2**31 - 1)
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    assert cli.main(["generate", str(folder), "--prompt", "a"]) == 1
    assert "expected a cache of the prompt, --tokens 300 and windows" in capsys.readouterr().err
