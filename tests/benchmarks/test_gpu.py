"""What is wanted of a GPU, held against what was measured. The run itself: tests/workers/engine/test_cuda.py."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu import figures_of


def test_figures_are_held_against_those_wanted() -> None:
    def runs(rate: float, **more: Any) -> dict[str, Any]:
        return {"best": rate, "runs": [{"requests_per_s": rate, "device": {"utilization_percent": 95.0}, **more}]}

    report = {
        "options": {"artifact": None},
        "shape": "llama2-7b",
        "start_s": 8.0,
        "kv_cache": {"share": 0.94, "holds_all_rows": False},
        "w5_of_w1": 0.96,
        "results": {
            "W1": runs(160.0),
            "W3": runs(20.0),
            "W5": runs(150.0),
            "small": runs(9.0, steps={"busy_share": 0.85}),
        },
    }
    peer = {"results": {"W1": [{"requests_per_s": 140.0}, {"requests_per_s": 150.0}]}}
    met = {figure.name: figure.is_met for figure in figures_of(report, peer)}
    assert met == {
        "W1, requests/s, of the peer's": True,
        "W3, requests/s, of the peer's": None,
        "W5, of the engine alone": True,
        "W1, utilization by NVML, percent": True,
        "W3, utilization by NVML, percent": True,
        "small, share of the run with a step in flight": True,
        "KV cache, of the memory left for it": False,
        "start, seconds": True,
    }
