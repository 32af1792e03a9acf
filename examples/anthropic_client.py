"""Start `cedar serve` and use Anthropic's own client: an answer, then a call that must be made, as JSON.

python examples/anthropic_client.py [MODEL_DIR]
"""

import subprocess
import sys

import anthropic

model = ["--model", sys.argv[1]] if sys.argv[1:] else []
command = [sys.executable, "-m", "cedar.cli.main", "serve", "--port", "0", "--alias", "any", *model]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    assert server.stdout is not None
    url = next(line.split()[1] for line in server.stdout if line.startswith("page"))
    client = anthropic.Anthropic(base_url=url.rstrip("/"), api_key="none")
    message = client.messages.create(
        model="any", max_tokens=40, messages=[{"role": "user", "content": "Tell me about the sea."}]
    )
    print(message.content[0].to_json() if message.content else "nothing to say", message.stop_reason)
    # the grammar lets only this call through, whatever the model would rather say
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["colour", "count"],
    }
    message = client.messages.create(
        model="any",
        max_tokens=400,
        messages=[{"role": "user", "content": "Paint the fence."}],
        tools=[{"name": "paint", "description": "Paint something.", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
    )
    print(message.content[0].to_json(), message.stop_reason)
finally:
    server.terminate()
    server.wait()
