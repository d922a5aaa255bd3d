"""What is written beside an exported model: a program of some 40 lines that reads a prompt and writes on from it."""

from typing import Literal

Format = Literal["onnx", "torch"]

_WHOLE = '''"""Write on from a prompt: python example.py "a prompt", or its token ids: python example.py 17 4 92.

It needs {needs}, and for words `tokenizers`; neither hf_linear_attn nor Transformers.
"""

import json
import sys
from pathlib import Path

{imports}

HERE = Path(__file__).parent
PIECE = 256  # tokens that are read at once: memory grows with their square, and not with the length of the prompt
about = json.loads((HERE / "export.json").read_text())
{opened}


def start(rows=1):
    """Return the states before the first token, the only memory there is."""
    shapes = [[rows if size == "rows" else size for size in state["shape"]] for state in about["states"]]
    return [{zeros} for state, shape in zip(about["states"], shapes)]


def read(ids, states):
    """Read tokens [rows, T], any number; return logits [rows, T, vocabulary] and the states after them."""
    ids = {array}
{run}


def write(prompt, new_tokens=40):
    """Return the most probable tokens after a prompt, token by token."""
    states, found = start(), []
    for at in range(0, len(prompt), PIECE):
        logits, states = read([prompt[at : at + PIECE]], states)
    while len(found) < new_tokens and not set(found[-1:]) & set(about["eos_token_id"]):
        found.append(int(logits[0, -1].argmax()))
        logits, states = read([found[-1:]], states)
    return found


if __name__ == "__main__":
    if all(word.isdigit() for word in sys.argv[1:]):
        print(*write([int(word) for word in sys.argv[1:]] or [0]))
    else:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
        print(tokenizer.decode(write(tokenizer.encode(" ".join(sys.argv[1:])).ids)))
'''

_PARTS: dict[Format, dict[str, str]] = {
    "onnx": {
        "needs": "onnxruntime and numpy",
        "imports": "import numpy as np\nimport onnxruntime",
        "opened": 'session = onnxruntime.InferenceSession(HERE / about["file"])',
        "zeros": 'np.zeros(shape, state["dtype"])',
        "array": "np.array(ids, np.int64)",
        "run": """\
    inputs = [ids, np.ones_like(ids), *states]  # the second is the attention mask: 0 for padding, on the left
    logits, *states = session.run(None, {one.name: x for one, x in zip(session.get_inputs(), inputs)})
    return logits, states""",
    },
    "torch": {
        "needs": "torch",
        "imports": "import torch",
        "opened": 'program = torch.export.load(HERE / about["file"]).module()',
        "zeros": 'torch.zeros(shape, dtype=getattr(torch, state["dtype"]))',
        "array": "torch.tensor(ids)",
        "run": """\
    with torch.no_grad():
        # The second is the attention mask: 0 for padding, on the left.
        logits, *states = program(ids, torch.ones_like(ids), *states)
    return logits, states""",
    },
}


def example(format: Format) -> str:
    """Return the program for a format."""
    return _WHOLE.format(**_PARTS[format])
