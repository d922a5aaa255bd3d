"""A process of its own that serves folders with vLLM: jobs come as a JSON file, answers go to another.

A job has a folder, options of vLLM's, prompts, how many tokens each is to be answered with, how often all are sent, and
after how many steps of the engine the next prompt is sent.
"""

import gc
import json
import sys
import time
from pathlib import Path


def serve(job):
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**26,
    }
    llm = LLM(job["folder"], **options | job.get("options", {}))
    engine, rounds = llm.llm_engine, []
    for _ in range(job.get("rounds", 1)):
        rounds.append(answer(engine, job, SamplingParams))
    found = {"rounds": rounds}
    core = getattr(engine.engine_core, "engine_core", None)
    # Several ranks are processes of their own.
    if hasattr(getattr(core, "model_executor", None), "driver_worker"):
        found["layers"] = kinds_of_layers(core)
    del llm, engine, core
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def kinds_of_layers(core):
    cache = core.model_executor.driver_worker.worker.model_runner.kv_cache_config
    kinds = {}
    for group in cache.kv_cache_groups:
        name = type(group.kv_cache_spec).__name__
        kinds[name] = kinds.get(name, 0) + len(group.layer_names)
    return kinds


def answer(engine, job, params):
    every, waiting, done = job.get("every", 2), list(enumerate(job["prompts"])), {}
    core, preempted, steps = getattr(engine.engine_core, "engine_core", None), set(), 0
    step_s = []
    while waiting or engine.has_unfinished_requests():
        while waiting and (not every or steps % every == 0):
            number, ids = waiting.pop(0)
            # Requests that run beside each other end at different times.
            new = job["new"] - job.get("fewer", 3) * number
            settings = params(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
            engine.add_request(str(number), {"prompt_token_ids": ids}, settings)
            if every:
                break
        start = time.perf_counter()
        for output in engine.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = output
        step_s.append(time.perf_counter() - start)
        steps += 1
        if core is not None:
            requests = core.scheduler.requests.values()
            preempted |= {request.request_id.split("-")[0] for request in requests if request.num_preemptions}
    outputs = [done[number] for number in range(len(done))]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "preempted": sorted(preempted),
        "steps": steps,
        "step_s": step_s,
    }


def main():
    jobs, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    answers = {}
    for name, job in jobs.items():
        try:
            answers[name] = serve(job)
        except Exception as error:
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
        target.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
