"""What the config of a model says stands in the keys of a GGUF file made of it, or is refused."""

from dataclasses import replace

from tiny_checkpoint import write_checkpoint

from cpmrt.quantization.gguf_conversion import to_gguf
from cpmrt.quantization.gguf_keys import model_keys
from cpmrt.weights.gguf.file import GgufModel
from cpmrt.weights.hugging_face import HuggingFace
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.repository import Repository


def made_of(folder, target=None):
    """The path of a file in bfloat16 made of a folder."""
    path = target or folder.with_name(f"{folder.name}.gguf")
    to_gguf(ModelFolder.open(folder), path, "bf16")
    return path


def test_a_file_has_the_name_of_the_model(tmp_path):
    folder = write_checkpoint(tmp_path / "MiniCPM4-0.5B")
    path = made_of(folder)
    again = made_of(path, tmp_path / "again.gguf")
    assert [name_in(path), name_in(again)] == ["MiniCPM4-0.5B"] * 2
    cached = replace(ModelFolder.open(folder), repository=Repository(HuggingFace(), "openbmb/MiniCPM4.1-8B"))
    assert model_keys(cached, 0)["general.name"] == "MiniCPM4.1-8B"


def name_in(path):
    with GgufModel.open(path) as model:
        return model.metadata["general.name"]
