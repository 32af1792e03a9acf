"""Start `cedar serve` and talk to it with OpenAI's own client, streaming.

python examples/openai_client.py [MODEL_DIR]
"""

import subprocess
import sys

import openai

model = ["--model", sys.argv[1]] if sys.argv[1:] else []
command = [sys.executable, "-m", "cedar.cli.main", "serve", "--port", "0", *model]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    assert server.stdout is not None
    url = next(line.split()[1] for line in server.stdout if line.startswith("API"))
    client = openai.OpenAI(base_url=url, api_key="none")
    name = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "Once upon a time there was a fox"}],
        max_tokens=40,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n[{name}: {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")
finally:
    server.terminate()
    server.wait()
