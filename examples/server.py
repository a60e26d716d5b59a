"""Serve a model and ask it with the client of OpenAI: python examples/server.py [MODEL]

Needs the extra `server` and `pip install openai`. A server of your own runs with `cpmrt serve`.
"""

import re
import subprocess
import sys

from openai import OpenAI

model = ["--model", *sys.argv[1:]] if sys.argv[1:] else []
command = [sys.executable, "-m", "cpmrt", "serve", "--port", "0", *model]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if found := re.search(r"ready: .* at (http://[\d.:]+)", line):
                break
        else:
            sys.exit(line.strip())  # the server has ended; its last line says why
        client = OpenAI(base_url=f"{found[1]}/v1", api_key="none")
        served = client.models.list().data[0].id
        messages = [{"role": "user", "content": "What is a list?"}]
        answer = client.chat.completions.create(
            model=served, messages=messages, max_tokens=32, temperature=0, stream=True
        )
        for chunk in answer:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
    finally:
        server.terminate()
