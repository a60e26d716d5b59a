"""`cpmrt chat` as a program whose model answers with what stands between say( and )yas, else with the conversation.

Tests start it on a terminal. Arguments: a folder for the model, seconds for each token, arguments of the chat.
"""

from __future__ import annotations

import sys
from pathlib import Path

from serving import saying_llm

from cpmrt.cli import chat
from cpmrt.cli.main import main


def reply(prompt: str) -> str:
    return prompt.rpartition("say(")[2].partition(")yas")[0] if "say(" in prompt else prompt


if __name__ == "__main__":
    folder, delay_s = Path(sys.argv[1]), float(sys.argv[2])

    def open_model(**options):
        return saying_llm(folder, reply, delay_s=delay_s)

    chat.LLM = open_model
    sys.exit(main(["chat", *sys.argv[3:]]))
