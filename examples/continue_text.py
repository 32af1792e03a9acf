"""Continue a text with a model, piece by piece.

python examples/continue_text.py [MODEL_DIR]
"""

import sys

import cedar

with cedar.LLM(*sys.argv[1:]) as llm:
    prompt = "Once upon a time there was a little fox who"
    print(prompt, end="", flush=True)
    for piece in llm.stream_generate(prompt, max_tokens=60, temperature=0.8, seed=7):
        print(piece, end="", flush=True)
    print()
    assert llm.last is not None
    print(f"[{llm.last.completion_tokens} tokens, {llm.last.cache_bytes} bytes of cache, {llm.last.reason}]")
