"""What the engine says while it works: progress of the prompt, tokens, the end; and how to let a request go.

python examples/engine_events.py [MODEL_DIR]
"""

import sys

from cedar.config.serve import ServeConfig
from cedar.engine.load import open_model, start_engine
from cedar.engine.request import Finished, Progress, Request, SamplingParams, Token

files = open_model(*sys.argv[1:])
engine = start_engine(files, ServeConfig(max_step_tokens=64))
bos = files.tokenizer.special["<｜begin▁of▁sentence｜>"]
prompt = (bos, *files.tokenizer.encode("The fox went to the river and came back. " * 20))

first = engine.submit(Request(prompt_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=8)))
second = engine.submit(Request(prompt_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=8)))
second.cancel()

for event in first:
    match event:
        case Progress(done, total):
            print(f"prompt {done} of {total}")
        case Token(token_id):
            print(f"token {token_id}: {files.tokenizer.decode([token_id])!r}")
        case Finished(reason=reason, prefill_s=prefill_s, decode_s=decode_s):
            print(f"{reason}: {prefill_s:.3f} s for the prompt, {decode_s:.3f} s for the answer")
print("second:", [type(event).__name__ for event in second])
engine.close()
