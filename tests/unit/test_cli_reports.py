"""`cpmrt plan` and `inspect`: figures that are right, JSON that parses, exit codes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from math import prod

import gguf_models
import pytest
from reference.quantised_models import CASES, write_quantised
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import CONFIG, write_checkpoint

from cpmrt import LLM
from cpmrt.cli.main import main
from cpmrt.cli.parser import Parser


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def json_of(capsys):
    """Return a function that runs a command with --json and returns its exit code and its JSON object."""

    def run(*arguments):
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_plan_is_the_table_of_the_plan(checkpoint, capsys):
    assert main(["plan", str(checkpoint)]) == 0
    out, err = capsys.readouterr()
    with LLM(checkpoint, executor="reference") as llm:  # float32, as the config says
        assert out == f"{checkpoint}: MiniCPMForCausalLM, float32\n{llm.plan}\n" and err == ""


def test_the_bundled_model_has_a_name(tmp_path, monkeypatch, capsys, checkpoint):
    outputs = []
    for line in (["plan"], ["plan", "demo"], ["inspect"], ["inspect", "demo"]):
        assert main(line) == 0
        outputs.append(capsys.readouterr().out.replace("the bundled model", "demo"))
    assert outputs[0].splitlines()[1:] == outputs[1].splitlines()[1:] and outputs[2] == outputs[3]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, "demo")  # a folder of that name comes first
    assert main(["plan", "demo"]) == 0 and capsys.readouterr().out != outputs[1]


def test_plan_needs_config_json_only(checkpoint, tmp_path, json_of):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    code, record = json_of("plan", tmp_path, "--dtype", "bf16", "--context", 128, "--max-sequences", 3)
    assert code == 0 and record["dtype"] == "bfloat16" and "fits" not in record
    assert (record["max_context"], record["max_sequences"]) == (128, 3)
    per_token = 2 * 2 * 2 * 32 * 2  # keys and values, layers, heads, head_dim, bytes
    assert record["kv_bytes_per_token"] == per_token and record["part_bytes"]["KV pages"] == 3 * 128 * per_token
    assert sum(record["part_bytes"].values()) == record["total_bytes"]


@pytest.mark.parametrize(("dtype", "label"), [("auto", "bfloat16"), ("float16", "float16"), ("fp32", "float32")])
def test_plan_takes_bfloat16_where_the_config_names_no_type(tmp_path, json_of, dtype, label):
    config = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert json_of("plan", tmp_path, "--dtype", dtype)[1]["dtype"] == label


def test_plan_finds_the_largest_context(checkpoint, json_of, capsys):
    _, whole = json_of("plan", checkpoint)
    budget = whole["total_bytes"] - 1
    code, record = json_of("plan", checkpoint, "--gpu-memory", budget)
    assert code == 0 and record["fits"] and record["total_bytes"] <= budget
    assert record["max_context"] == record["largest_context"] < 2048
    assert json_of("plan", checkpoint, "--gpu-memory", budget, "--context", record["largest_context"])[0] == 0
    code, record = json_of("plan", checkpoint, "--gpu-memory", budget, "--context", record["largest_context"] + 64)
    assert code == 1 and record["fits"] is False
    assert record["left_bytes"] == budget - record["total_bytes"] < 0
    assert main(["plan", str(checkpoint), "--gpu-memory", "8GiB"]) == 0
    assert capsys.readouterr().out.endswith("largest context that fits 8.00 GiB: 2048 tokens\n")


def test_plan_that_does_not_fit_is_shown_and_refused(checkpoint, capsys):
    assert main(["plan", str(checkpoint), "--gpu-memory", "100KiB"]) == 1
    out, err = capsys.readouterr()
    assert "workspace" in out and out.endswith("largest context that fits 100.00 KiB: none\n")
    assert err.startswith("cpmrt: error: the plan for 64 tokens of context does not fit") and err.count("\n") == 1


@pytest.mark.parametrize(
    "wish", [[], ["--context", "128K"], ["--max-context", "131072"], ["--block-type", "q8_0", "--context", "128K"]]
)
def test_what_a_plan_advises_is_an_option_it_has_and_fits(capsys, wish):
    plan = ["plan", "--shape", "minicpm4-8b", "--gpu-memory", "8GiB"]
    assert main([*plan, *wish]) == 1
    advice = r"; --weight-bits 4 fits, with a context of up to (\d+) tokens$"
    context = re.search(advice, capsys.readouterr().err.strip())
    assert main([*plan, "--weight-bits", "4", "--context", context[1]]) == 0
    assert main([*plan, "--weight-bits", "4", "--context", str(int(context[1]) + 64)]) == 1
    assert f"; --context {context[1]} fits" in capsys.readouterr().err


def test_a_context_is_named_in_thousands_wherever_there_is_one(checkpoint, json_of):
    assert json_of("plan", checkpoint, "--context", "2K")[1]["max_context"] == 2048
    for line in (["generate", "x"], ["chat"], ["serve"], ["bench"]):
        module = importlib.import_module(f"cpmrt.cli.{line[0]}")
        parser = Parser(prog="cpmrt")
        module.configure(parser)
        assert parser.parse_args([*line[1:], "--max-context", "128K"]).max_context == 131072


def test_plan_of_a_real_config(shared_data, tmp_path, json_of):
    (tmp_path / "config.json").write_bytes((shared_data / "minicpm4_8b_config.json").read_bytes())
    code, record = json_of("plan", tmp_path, "--context", 131072, "--gpu-memory", "8GiB", "--hf-overrides",
                           '{"max_position_embeddings": 131072}')  # fmt: skip
    assert code == 1 and record["total_bytes"] > 16 * 2**30 and record["largest_context"] == 0


def test_inspect_shows_every_part(checkpoint, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for shown in (
        "architecture MiniCPMForCausalLM", "num_layers 2", "tensor_dtypes F32 20", "rope kind default, theta 10000.0",
        "scales.scale_emb 4.0", "special_ids.eos 2", "tokenizer.vocab_size 259", "tokenizer.chat_template yes",
        "2 model.layers.*.mlp.up_proj.weight F32 [128, 64] 64.00 KiB", "model.safetensors", "this version can run it",
    ):  # fmt: skip
        assert shown in out


def test_inspect_shows_the_sampling_of_the_model(tmp_path, capsys, json_of):
    folder = write_checkpoint(tmp_path / "model")
    assert main(["inspect", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "sampling temperature 0.0, top_k 0" in shown and "source the checkpoint recommends nothing" in shown
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "top_k": 20}')
    own = {"temperature": 0.7, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    own["loop_penalty"] = 1.0
    assert json_of("inspect", folder)[1]["sampling"] == own | {"source": "generation_config.json"}
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    code, record = json_of("inspect", folder)
    assert code == 0 and "generation_config.json: temperature" in record["problems"][0]


def test_inspect_json_holds_every_tensor(checkpoint, json_of):
    code, record = json_of("inspect", checkpoint)
    stored = load_file(checkpoint / "model.safetensors")
    assert code == 0 and record["problems"] == []
    assert {t["name"]: (t["shape"], t["bytes"]) for t in record["tensors"]} == {
        name: (list(array.shape), array.nbytes) for name, array in stored.items()
    }
    assert record["parameters"] == sum(prod(array.shape) for array in stored.values())
    assert record["tokenizer"] == {"vocab_size": 259, "bos": 1, "eos": [2], "chat_template": True}


def test_inspect_lists_tensors_on_demand(checkpoint, capsys):
    assert main(["inspect", str(checkpoint), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.1.mlp.up_proj.weight" in out and "layers.*" not in out


def broken(checkpoint, tmp_path, **config):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def test_inspect_of_an_unsupported_architecture(checkpoint, tmp_path, capsys, json_of):
    folder = broken(checkpoint, tmp_path, architectures=["MambaForCausalLM"], state_size=16)
    code, record = json_of("inspect", folder)
    assert code == 0 and len(record["tensors"]) == 20 and "MambaForCausalLM is not supported" in record["problems"][0]
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "will not run: " in out and "config.state_size" in out and "can run it" not in out


def test_inspect_of_weights_that_are_not_quantised_as_promised(checkpoint, tmp_path, json_of):
    folder = broken(checkpoint, tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    code, record = json_of("inspect", folder)
    assert code == 0 and record["quantization"] == {"method": "gptq"}
    assert "no tensor is quantised" in record["problems"][0]


def quantised(name, tmp_path, **settings):
    return write_quantised(next(case for case in CASES if case.name == name), tmp_path / name, 0, **settings)


def test_inspect_of_quantised_weights(tmp_path, json_of, capsys):
    folder = quantised("gptq_orders_apart", tmp_path)
    code, record = json_of("inspect", folder)
    assert code == 0 and record["problems"] == []
    assert record["quantization"] == {
        "method": "gptq", "tensors": "gptq", "bits": [4], "group_size": [64], "symmetric": True, "act_order": True,
        "lm_head_bits": 16, "in_16_bits": ["lm_head"],
        "dequantised": ["layers.0.qkv", "layers.0.gate_up", "layers.1.qkv", "layers.1.gate_up"],
    }  # fmt: skip
    assert main(["inspect", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "quantization.group_size 64 quantization.symmetric yes quantization.act_order yes" in shown
    assert "this version can run it" in shown


def test_the_bits_of_a_gguf_model_are_numbers(tmp_path, json_of, capsys):
    path = gguf_models.write_pair(tmp_path, "llama", gguf_models.mixed).gguf
    for command in ("inspect", "plan"):
        quantization = json_of(command, path)[1]["quantization"]
        assert (quantization["bits"], quantization["group_size"]) == ([4, 6], [16, 32])
        assert (quantization["tensors"], quantization["lm_head_bits"]) == ("Q4_K and Q6_K", 6)
    assert main(["inspect", str(path)]) == 0
    assert "quantization.bits 4, 6 quantization.group_size 16, 32" in " ".join(capsys.readouterr().out.split())


def test_inspect_says_what_is_wrong_with_quantised_weights(tmp_path, json_of):
    _, record = json_of("inspect", quantised("awq", tmp_path, group_size=64))
    assert record["quantization"]["method"] == "awq" and "28 wrong" in record["problems"][0]


@pytest.mark.parametrize(("name", "words"), [
    ("gptq", "gptq 4 bits, groups of 128, head in 16 bits"),
    ("gptq_v2_act_order", "gptq 4 bits, groups of 32, zero points, act-order, head in 16 bits"),
    ("gptq_row", "gptq 4 bits, groups of 128 and 256, head in 4 bits"),
    ("awq_some", "awq 4 bits, groups of 64, zero points, head in 16 bits, 4 matrices of layers in 16 bits"),
    ("marlin", "marlin 4 bits, groups of 128, head in 16 bits"),
])  # fmt: skip
def test_plan_of_quantised_weights(name, words, tmp_path, json_of, capsys):
    folder = quantised(name, tmp_path)
    assert main(["plan", str(folder), "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert words in out
    with LLM(folder, executor="reference", dtype="float32") as llm:
        assert out.endswith(f"{llm.plan}\n")


def test_plan_of_a_quantised_model_without_its_weights(tmp_path, json_of):
    with_weights = json_of("plan", quantised("awq_some", tmp_path))[1]
    (tmp_path / "awq_some" / "model.safetensors").unlink()
    alone = json_of("plan", tmp_path / "awq_some")[1]
    assert alone["total_bytes"] == with_weights["total_bytes"] and alone["quantization"] == with_weights["quantization"]


def test_plan_of_8b_in_four_bits(json_of, capsys):
    shape = ["plan", "--shape", "minicpm4-8b", "--context", "32768", "--gpu-memory", "8GB"]
    code, record = json_of(*shape, "--weight-bits", "4")
    layer_weights = 32 * (4096 * (4096 + 512) + 4096 * 4096 + 3 * 4096 * 16384)
    assert code == 0 and record["fits"] and record["left_bytes"] == 8 * 10**9 - record["total_bytes"] > 1.5 * 10**9
    assert record["part_bytes"]["layers"] == pytest.approx(layer_weights * (0.5 + 2 / 128), rel=1e-3)
    assert json_of(*shape)[0] == 1
    smaller = json_of(*shape, "--weight-bits", "4", "--lm-head-bits", "4")[1]
    assert record["left_bytes"] < smaller["left_bytes"] < record["left_bytes"] + 0.75 * 73448 * 4096 * 2
    assert main([*shape, "--weight-bits", "4", "--group-size", "32"]) == 0
    assert "groups of 32" in (out := capsys.readouterr().out) and "fits 7.45 GiB: yes, 1.1" in out
    assert main([*shape, "M"]) == 2


def test_plan_of_keys_and_values_in_fp8(json_of):
    shape = ["plan", "--shape", "minicpm4-8b", "--sparse", "off", "--context", "32768"]
    wide, narrow = json_of(*shape)[1]["part_bytes"]["KV pages"], json_of(*shape, "--kv-dtype", "fp8")[1]
    scales = 2 * 4 * 32 * 2 * (32768 // 64)  # of keys and values; bytes, layers, heads, pages
    assert narrow["part_bytes"]["KV pages"] == wide // 2 + scales and narrow["kv_bytes_per_token"] == wide // 32768 // 2
    sparse = json_of(*shape[:3], "--sparse", "{}", "--context", "32768", "--kv-dtype", "fp8")[1]["part_bytes"]
    compressed = 32 * 2 * 128 * (32768 // 16 + 32768 // 64) * 2  # layers, heads, elements, windows, bytes
    assert (sparse["KV pages"], sparse["compressed keys"]) == (wide // 2 + scales, compressed)
    drafted = json_of(*shape, "--draft", "lookup", "--kv-dtype", "fp8")[1]["part_bytes"]["KV pages"]
    nodes = 2 * 32 * 9 * 2 * (128 + 4)  # of keys and values; layers, nodes of the largest tree, heads, bytes
    assert drafted == narrow["part_bytes"]["KV pages"] + nodes


def test_inspect_lists_all_that_is_wrong(checkpoint, tmp_path, json_of):
    folder = broken(checkpoint, tmp_path, num_hidden_layers=3)
    (folder / "tokenizer.json").unlink()
    code, record = json_of("inspect", folder)
    problems = "\n".join(record["problems"])
    assert code == 0 and "9 missing" in problems and "has no tokenizer.json" in problems


def test_inspect_of_weights_that_are_not_read(checkpoint, tmp_path, json_of):
    folder = broken(checkpoint, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    code, record = json_of("inspect", folder)
    assert code == 0 and record["tensors"] == [] and "no safetensors weights" in record["problems"][0]


def test_names_in_a_checkpoint_do_not_steer_the_terminal(checkpoint, tmp_path, capsys):
    folder = broken(checkpoint, tmp_path, architectures=["\x1b[2J"])
    save_file(load_file(folder / "model.safetensors") | {"\x1b]0;owned\x07": load_file(folder / "model.safetensors")
              ["model.norm.weight"]}, folder / "model.safetensors")  # fmt: skip
    assert main(["inspect", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\\x1b]0;owned\\x07" in out
