"""Serve a converted folder with vLLM, ask it from many clients at once, and compare every answer with Transformers'.

Without arguments: the student that `make demo` made, or the small teacher, converted as the demo does, where there
is none yet. Needs vLLM in this environment: `make vllm-environment` makes one.

    python examples/serve_vllm.py
    python examples/serve_vllm.py --model DIR --clients 16 --seconds 300 --kill
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linear_attn import from_pretrained, patch_model

TEACHER = Path(__file__).parent / "teacher"
STUDENT = Path("runs/quickstart/student")
SETTINGS = {"feature_map": "norm_preserving", "window": 64, "sinks": 4}
OPTIONS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager")
MEMORY = ("--kv-cache-memory-bytes", str(2**26))
# On a CPU, oneDNN compiles its products anew for every number of tokens in a step, and keeps 1,024 of them if nothing
# bounds it: a server would grow for as long as it meets new numbers.
BOUNDED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
LENGTHS = (1, 5, 40, 64, 65, 200, 700, 1500)
# The best two tokens of a step may be so close that sums in another order exchange them.
LEAST_MARGIN = 1e-3
START_S, ANSWER_S, STOP_S = 900.0, 120.0, 60.0


@dataclass
class Load:
    """What a load test saw.

    Attributes:
        seconds: How long it ran.
        answered: Requests that were answered rightly.
        wrong: Those that were answered with other tokens than Transformers'.
        lost: Those that were not answered.
        tokens: New tokens of all answers.
        latency_ms: Median and largest time to a whole answer.
        rss_mib: What the server's processes held at equal intervals.
    """

    seconds: float
    answered: int = 0
    wrong: int = 0
    lost: int = 0
    tokens: int = 0
    latency_ms: list[float] = field(default_factory=list)
    rss_mib: list[int] = field(default_factory=list)


def converted(folder: Path) -> Path:
    """Convert the small teacher, and save it with its tokenizer."""
    model = patch_model(AutoModelForCausalLM.from_pretrained(TEACHER), **SETTINGS)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TEACHER).save_pretrained(folder)
    return folder


def draw_prompts(vocabulary: int, number: int) -> list[list[int]]:
    """Draw texts of several lengths."""
    rng = random.Random(0)
    return [[rng.randrange(3, vocabulary) for _ in range(rng.choice(LENGTHS))] for _ in range(number)]


@torch.no_grad()
def answers(folder: Path, number: int, new: int) -> dict[tuple[int, ...], list[int]]:
    """Return Transformers' answers by prompt, but for those with a step that two tokens nearly share."""
    model = from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    found = {}
    for prompt in draw_prompts(model.config.vocab_size, number):
        ids = torch.tensor([prompt])
        output = model.generate(ids, **options, output_logits=True, return_dict_in_generate=True)
        best = torch.stack(output.logits)[:, 0].topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > LEAST_MARGIN:
            found[tuple(prompt)] = output.sequences[0, len(prompt) :].tolist()
    return found


@contextmanager
def server(folder: Path, log: Path, *options: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start vLLM's server of the OpenAI API on a free port of this machine, and stop it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("ab") as output:
        environment = BOUNDED | os.environ
        process = subprocess.Popen([*command, *OPTIONS, *options], stdout=output, stderr=output, env=environment)
    try:
        wait_for(port, process, log)
        yield port, process
    finally:
        end(process, signal.SIGTERM)


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    start = time.monotonic()
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except OSError:
            if process.poll() is not None or time.monotonic() - start > START_S:
                raise SystemExit(f"The server did not start:\n{log.read_text()[-3000:]}") from None
            time.sleep(0.5)


def end(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    """End the server with all the processes that it started."""
    try:
        every = [psutil.Process(process.pid)]
        every += every[0].children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for one in every if sign == signal.SIGKILL else every[:1]:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(sign)
    for one in psutil.wait_procs(every, STOP_S)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def ask(port: int, model: Path, prompt: tuple[int, ...], new: int) -> list[int]:
    """Ask for the next tokens of a prompt; both are numbers, as no text would then be taken apart differently."""
    body = {"model": str(model), "prompt": list(prompt), "max_tokens": new, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
    return tokens


def load(
    port: int,
    process: subprocess.Popen[bytes],
    model: Path,
    expected: dict[tuple[int, ...], list[int]],
    clients: int,
    seconds: float,
) -> Load:
    """Ask from several clients at once, each as soon as it was answered, and watch what the server holds."""
    seen, lock, times = Load(seconds), threading.Lock(), []
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            prompt = rng.choice(list(expected))
            new, start = rng.randint(1, len(expected[prompt])), time.monotonic()
            try:
                found = ask(port, model, prompt, new)
            except (OSError, ValueError, KeyError):
                with lock:
                    seen.lost += 1
                continue
            with lock:
                right = found == expected[prompt][:new]
                seen.answered += right
                seen.wrong += not right
                seen.tokens += len(found)
                times.append(1000 * (time.monotonic() - start))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        every = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        seen.rss_mib.append(sum(one.memory_info().rss for one in every) // 2**20)
        time.sleep(max(seconds / 20, 1))
    seen.latency_ms = [round(statistics.median(times), 1), round(max(times), 1)] if times else []
    return seen


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a converted folder with a tokenizer")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--prompts", type=int, default=20, help="texts that are drawn and asked about")
    parser.add_argument("--new", type=int, default=24, help="the most tokens of an answer")
    parser.add_argument("--kill", action="store_true", help="kill the server afterwards, start another, and ask again")
    parser.add_argument("--log", type=Path, default=Path("runs/serve_vllm.log"))
    chosen = parser.parse_args()
    chosen.log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or (STUDENT if STUDENT.is_dir() else converted(Path(folder)))
        expected = answers(model, chosen.prompts, chosen.new)
        print(f"{len(expected)} prompts of {chosen.prompts} have an answer that no rounding changes.")
        options = (*MEMORY, "--enable-prefix-caching")
        with server(model, chosen.log, *options) as (port, process):
            seen = load(port, process, model, expected, chosen.clients, chosen.seconds)
            if chosen.kill:
                end(process, signal.SIGKILL)
        print(json.dumps(asdict(seen), indent=2))
        again = Load(0)
        if chosen.kill:
            with server(model, chosen.log, *options) as (port, process):
                for prompt, tokens in expected.items():
                    right = ask(port, model, prompt, len(tokens)) == tokens
                    again.answered += right
                    again.wrong += not right
            print(f"Killed and started again, the server answered {again.answered} rightly and {again.wrong} wrongly.")
        if seen.wrong or seen.lost or again.wrong or not seen.answered:
            raise SystemExit("Some answers were wrong or lost.")


if __name__ == "__main__":
    main()
