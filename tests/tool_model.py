"""The bundled model with a chat template that describes tools in the format of a family of models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from serving import TOOL_TEMPLATE

import cpmrt
from cpmrt import LLM

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "what it does",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"enum": ["celsius", "kelvin"]},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_climate")
]  # fmt: skip
MARKERS = {"hermes": "<tool_call>", "minicpm4": "<|tool_call_start|>", "minicpm5": '<function name="'}


def tool_folder(folder: Path, family: str) -> Path:
    """Make a folder of the bundled model whose template has the markers of a family."""
    bundled = Path(cpmrt.__file__).parent / "assets" / "demo"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        shutil.copyfile(bundled / name, folder / name)
    settings = json.loads((bundled / "tokenizer_config.json").read_text())
    template = f"{{# calls begin with {MARKERS[family]} #}}{TOOL_TEMPLATE}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


def tool_llm(folder: Path, family: str) -> LLM:
    return LLM(tool_folder(folder, family), executor="reference", max_sequences=4, max_context=1024)
