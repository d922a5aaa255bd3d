"""A converted model beside its teacher in vLLM, on a CPU: requests that a cache holds, and a step's time by context.

    python benchmarks/run.py --suite serving
    python benchmarks/run.py --suite serving --heads 16 --contexts 100 1000 3000 --running 4 --output wide.json

The small teacher of the examples, or with `--heads` one of that many heads of 64 with random weights, and the same
converted with the recommended recipe, and with one that keeps 64 keys by a learned rule in place of a linear branch,
fp32, eager, a process each, on one thread. Requests held are vLLM's own count for
a cache of 1 GiB. A step is one new token for every running request, as processor time of the whole engine; medians are
compared. All requests share one prompt by prefix caching, so that reading it is paid for once; the teacher's requests
then read the same keys, which favours it. `make vllm-environment` makes the environment that this needs.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from harness import facts_line, markdown, provenance, suite_parser, write
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_linear_attn import patch_model

TEACHER = Path(__file__).parents[2] / "examples" / "teacher"
NEAR = {"window": 64, "sinks": 4}
RECIPES = {
    "recommended": NEAR | {"feature_map": "norm_preserving"},
    "kept keys": NEAR | {"kept": 64, "mix": "window", "retention": "learned", "retention_units": 16, "rotary": "undo"},
}
HELD = (2048, 8192, 32768)
"""Lengths for which requests are counted."""
CACHE_NBYTES = 2**30
CONTEXTS, RUNNING = (100, 3000, 30000), (1, 4, 16, 64)
LONGEST = 32768
WARM_UP = 4
Result = TypeVar("Result")


def wide_teacher(folder: Path, heads: int) -> Path:
    """Save a model with the small teacher's layers and tokens, and more and larger heads, two to a key head.

    Weights are random: what a step costs does not depend on them.
    """
    config = LlamaConfig.from_pretrained(TEACHER)
    sizes = {"hidden_size": 64 * heads, "intermediate_size": 176 * heads, "head_dim": 64}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    config.update(sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def engine_of(folder: Path, length: int, **options: Any) -> Any:
    """Start vLLM's engine in this process."""
    from vllm import LLM

    plain = {"enforce_eager": True, "dtype": "float32", "skip_tokenizer_init": True}
    cache = {"max_model_len": length, "kv_cache_memory_bytes": CACHE_NBYTES}
    positions = {"hf_overrides": {"max_position_embeddings": LONGEST}}
    return LLM(str(folder), **plain, **cache, **positions, **options).llm_engine


def alone(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a process of its own.

    What an engine leaves behind ends with its process; and vLLM 0.32 starts no engine on a CPU where Numba has been
    imported, as the loops of an earlier engine have done.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def requests_held(folder: Path, length: int) -> int:
    """Ask vLLM how many requests of a length its cache holds."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    engine = engine_of(folder, length, enable_prefix_caching=False)
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return int(get_max_concurrency_for_kv_cache_config(engine.vllm_config, runner.kv_cache_config))


def all_step_times(
    name: str, folder: Path, contexts: Sequence[int], requests: Sequence[int], steps: int
) -> dict[tuple[int, int], float]:
    """Return the time of a step, in seconds, by context and requests that run at once."""
    batch = {"max_num_seqs": max(requests), "max_num_batched_tokens": 2048}
    engine = engine_of(folder, LONGEST, enable_prefix_caching=True, **batch)
    times = {}
    for context, running in itertools.product(contexts, requests):
        spent = times[context, running] = step_times(engine, context, running, steps)
        print(name, context, running, f"{spent * 1e3:.2f} ms", flush=True)
    return times


def step_times(engine: Any, context: int, running: int, steps: int) -> float:
    """Return the median processor time, in seconds, of steps in which all requests get a token."""
    from vllm import SamplingParams

    prompt = [3 + (7 * n + n // 13) % 1000 for n in range(context)]
    # They are stopped when enough is known.
    options = SamplingParams(temperature=0, max_tokens=2048, ignore_eos=True, detokenize=False)
    names = [f"{context}-{running}-{number}" for number in range(running)]
    got: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            got[output.request_id] = len(output.outputs[0].token_ids)

    # The first reads the prompt, from which the others begin.
    for name in names:
        engine.add_request(name, {"prompt_token_ids": prompt}, options)
        if len(names) > 1 and name == names[0]:
            while not got:
                step()
    while len(got) < running or min(got.values()) < WARM_UP:
        step()
    spent = []
    for _ in range(steps):
        before, started = sum(got.values()), time.process_time()
        step()
        spent.append(time.process_time() - started)
        if sum(got.values()) != before + running:
            raise RuntimeError("a step did not give every request a token")
    engine.abort_request(list(got))
    while engine.has_unfinished_requests():
        step()
    return statistics.median(spent)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("serving", __doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens of the prompt")
    parser.add_argument("--running", type=int, nargs="+", default=list(RUNNING), help="requests at once")
    parser.add_argument("--heads", type=int, help="heads of a wider teacher, an even number (default: the small one)")
    parser.add_argument("--steps", type=int, default=24, help="steps of which the median counts (%(default)s)")
    arguments = parser.parse_args(argv)
    # Before vLLM is imported: one process, whose processor time is all there is, and no calls to other machines.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    import vllm

    facts = provenance("serving", argv or [])
    facts["vllm"] = vllm.__version__
    with tempfile.TemporaryDirectory() as folder:
        teacher = wide_teacher(Path(folder) / "teacher", arguments.heads) if arguments.heads else TEACHER
        models = {name: Path(folder) / name.replace(" ", "-") for name in RECIPES} | {"teacher": teacher}
        for name, recipe in RECIPES.items():
            patch_model(AutoModelForCausalLM.from_pretrained(teacher), **recipe).save_pretrained(models[name])
        times: dict[tuple[int, int], dict[str, float]] = {}
        for name, path in models.items():
            found = alone(all_step_times, name, path, arguments.contexts, arguments.running, arguments.steps)
            for key, spent in found.items():
                times.setdefault(key, {})[name] = spent
        held = [{"tokens": n} | {name: alone(requests_held, path, n) for name, path in models.items()} for n in HELD]
    steps = [
        {"context": context, "running": running}
        | {f"{name}, ms": 1e3 * spent for name, spent in found.items()}
        | {f"{name}, of teacher": found[name] / found["teacher"] for name in RECIPES}
        for (context, running), found in times.items()
    ]
    result = {"provenance": facts, "requests held in 1 GiB": held, "step": steps}
    about = " ".join((__doc__ or "").split("\n\n")[-1].split())
    parts = ["# Served by vLLM\n", facts_line(facts), f"vLLM {vllm.__version__}. {about}\n"]
    parts += ["## Requests held in 1 GiB\n", markdown(held), "## Step\n", markdown(steps)]
    write(arguments.output, result, "\n".join(parts))
    print(f"wrote {arguments.output} and .md")
