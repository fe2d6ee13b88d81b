"""The peer on a CPU: llama.cpp through llama-cpp-python's C API, batched greedy decoding, token ids in and out.

Runs in an interpreter of its own that has llama-cpp-python (benchmarks/cpu.py finds or builds one):
    python llama_cpp_peer.py MODEL.gguf --rows 1 8 32 64 --prompt-tokens 128 --new-tokens 64 --threads 2
Prints one JSON line for each row count, with the faster of llama.cpp's two cache layouts for it.
"""

import argparse
import ctypes
import json
import random
import time

import llama_cpp
import numpy as np


def measure(
    model: object, rows: int, prompt_tokens: int, new_tokens: int, threads: int, unified: bool
) -> dict[str, float]:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = rows * (prompt_tokens + new_tokens + 8)
    params.n_batch = 2048
    params.n_ubatch = 512
    params.n_seq_max = rows
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = unified
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp gave no context for {rows} rows")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
    rng = random.Random(0)
    prompts = [[rng.randrange(100, vocab_size) for _ in range(prompt_tokens)] for _ in range(rows)]

    def run(entries: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)
        for place, (token, position, row, wanted) in enumerate(entries):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = row
            batch.logits[place] = wanted
        code = llama_cpp.llama_decode(context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode returned {code}")

    def best_token(place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, place)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (vocab_size,)).argmax())

    def generate(new: int) -> tuple[float, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started = time.perf_counter()
        tokens = [0] * rows
        rows_per_run = max(1, params.n_batch // prompt_tokens)
        for first in range(0, rows, rows_per_run):
            group = range(first, min(rows, first + rows_per_run))
            entries = [(t, p, r, p == prompt_tokens - 1) for r in group for p, t in enumerate(prompts[r])]
            run(entries)
            for place, (_, _, row, wanted) in enumerate(entries):
                if wanted:
                    tokens[row] = best_token(place)
        prefilled = time.perf_counter()
        for step in range(new - 1):
            run([(tokens[row], prompt_tokens + step, row, True) for row in range(rows)])
            tokens = [best_token(row) for row in range(rows)]
        return prefilled - started, time.perf_counter() - prefilled

    prefill_s, decode_s = generate(new_tokens)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return {
        "rows": rows,
        "kv_unified": unified,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "requests_per_s": rows / (prefill_s + decode_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    silence = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silence, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(options.model.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp could not load {options.model}")
    for rows in options.rows:
        # A short trial, which warms up as well, chooses the layout for the run that counts.
        trials = [measure(model, rows, 16, 16, options.threads, unified) for unified in (False, True)]
        unified = trials[1]["requests_per_s"] > trials[0]["requests_per_s"]
        run = measure(model, rows, options.prompt_tokens, options.new_tokens, options.threads, unified)
        print(json.dumps(run), flush=True)


if __name__ == "__main__":
    main()
