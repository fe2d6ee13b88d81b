"""The peer of gpu.py: vLLM on the same workloads, with weights of the same shape and no tokenizer.

    python -m benchmarks.gpu_peer --workloads W1 W2 W3 W4 one [--shape llama3-8b] [--rows 512]
    python -m benchmarks.gpu_peer --artifact FOLDER --workloads small questions

Needs vLLM beside torch and a GPU. Random weights of a shape, or those of an artifact of float weights. Each workload is
run `--repeat` times with fresh prompts and an emptied prefix cache; the best counts. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import SHAPES
from benchmarks.workloads import Workload, make_workload
from workers.models.artifact import Artifact, load_artifact
from workers.models.cuda_graph import artifact_entries, stored_weights, weight_parts
from workers.models.description import Llama3Scaling, ModelDescription
from workers.models.errors import UnsupportedModel
from workers.models.huggingface import LAYER_TENSORS, TENSORS

SMOLLM2 = ModelDescription(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    rms_norm_epsilon=1e-5,
    rope_theta=100000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
)


def model_config(model: ModelDescription) -> dict[str, Any]:
    """The `config.json` of a Llama checkpoint of this shape."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "num_hidden_layers": model.num_layers,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.rms_norm_epsilon,
        "rope_theta": model.rope_theta,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if isinstance(model.rope_scaling, Llama3Scaling):
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling.factor,
            "low_freq_factor": model.rope_scaling.low_freq_factor,
            "high_freq_factor": model.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling.original_context_length,
        }
    return config


def write_checkpoint(artifact: Artifact, folder: Path) -> None:
    """Write an artifact's weights as float16 into a folder as `transformers` saves it, without a tokenizer.

    Raises UnsupportedModel for quantized artifacts, and for heads that are stored filled up.
    """
    from safetensors.numpy import save_file

    model = artifact.description
    if model.cache_head_dim != model.head_dim:
        raise UnsupportedModel(f"heads of {model.head_dim} channels are stored as {model.cache_head_dim}")
    stored = {
        name: bits.view(np.float16)
        for name, bits in stored_weights(artifact_entries(artifact.model_path), artifact.path, "float16")
    }
    for name, part in weight_parts(model).items():
        if part.whole in stored:
            stored[name] = stored[part.whole][part.first_row : part.first_row + part.shape[0]]
    tensors = {theirs: stored[ours] for theirs, ours in TENSORS.items() if ours in stored}
    for layer in range(model.num_layers):
        for theirs, ours in LAYER_TENSORS.items():
            tensors[f"model.layers.{layer}.{theirs}"] = np.ascontiguousarray(stored[f"layers.{layer}.{ours}"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model_config(model)))


def main(arguments: list[str]) -> None:
    shapes = SHAPES | {"smollm2-135m": SMOLLM2}
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=shapes, default="llama2-7b")
    parser.add_argument("--artifact", type=Path, help="of float weights")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W4", "one"])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=2)
    given = parser.parse_args(arguments)
    # The scheduler in this process, as in gpu.py, and nothing that wants a network.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    vllm: Any = importlib.import_module("vllm")
    artifact = load_artifact(given.artifact, check_digests=False) if given.artifact else None
    model = artifact.description if artifact else shapes[given.shape]
    with tempfile.TemporaryDirectory() as folder:
        if artifact:
            write_checkpoint(artifact, Path(folder))
        else:
            (Path(folder) / "config.json").write_text(json.dumps(model_config(model)))
        engine = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="auto" if artifact else "dummy",
            dtype="float16",
            max_model_len=min(4096, artifact.context_length) if artifact else 4096,
            gpu_memory_utilization=0.9,
            max_num_seqs=given.rows,
            enable_prefix_caching=True,
        )
        results: dict[str, list[dict[str, Any]]] = {}
        for name in ["one", *given.workloads]:  # the first is a warm-up
            workloads = [make_workload(name, model, turn + 1, artifact) for turn in range(given.repeat)]
            results[name] = [_run(engine, vllm, name, workload) for workload in workloads]
    print(f"\n{'workload':<12}{'req/s':>10}{'seconds':>10}{'new tok/s':>12}")
    for name, runs in results.items():
        best = max(runs, key=lambda run: run["requests_per_s"])
        print(f"{name:<12}{best['requests_per_s']:>10}{best['seconds']:>10}{best['new_tokens_per_s']:>12}")
    print(json.dumps({"peer": "vllm", "version": vllm.__version__, "shape": given.shape, "results": results}))


def _run(engine: Any, vllm: Any, name: str, workload: Workload) -> dict[str, Any]:
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    parameters = [
        vllm.SamplingParams(
            max_tokens=new,
            temperature=0,
            ignore_eos=True,
            stop_token_ids=list(workload.stop_token_ids),
            detokenize=False,
        )
        for new in workload.new_tokens
    ]
    engine.reset_prefix_cache()
    start = time.perf_counter()
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - start
    stops = workload.stop_token_ids
    answers = [[token for token in output.outputs[0].token_ids if token not in stops] for output in outputs]
    workload.check(answers)
    made = sum(map(len, answers))
    run: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "requests_per_s": round(len(prompts) / seconds, 2),
        "new_tokens_per_s": round(made / seconds),
    }
    print(f"vllm {name} {workload.description}: {json.dumps(run)}", flush=True)
    return run | ({"answers": answers} if stops else {})


if __name__ == "__main__":
    main(sys.argv[1:])
