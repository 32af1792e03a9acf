"""A conversation of two turns; the second message shows how to carry the first answer on.

python examples/chat.py [MODEL_DIR]
"""

import sys

import cedar

with cedar.LLM(*sys.argv[1:]) as llm:
    messages = [{"role": "user", "content": "Tell me about a fox and a river."}]
    first = llm.chat(messages, max_tokens=40, seed=1)
    print("model:", first.content)
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And what happened then?"},
    ]
    second = llm.chat(messages, max_tokens=40, seed=1)
    print("model:", second.content)
