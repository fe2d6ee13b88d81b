"""A machine with GPUs that are not there: see fake_nvml/pynvml.py."""

import importlib.util
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

FAKE_NVML = Path(__file__).parent / "fake_nvml"


def load_fake_nvml() -> ModuleType:
    """The stand-in as a module of its own, beside the real one."""
    spec = importlib.util.spec_from_file_location("fake_pynvml", FAKE_NVML / "pynvml.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Machine:
    """What the stand-in tells. `write` it whenever it changes; it is replaced whole, so nobody reads half of it."""

    path: Path
    devices: list[dict[str, Any]]
    more: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        text = json.dumps({"devices": self.devices, **self.more})
        partial = self.path.with_suffix(".new")
        partial.write_text(text)
        partial.replace(self.path)

    def environment(self) -> dict[str, str]:
        """For processes that are to see this machine."""
        before = os.environ.get("PYTHONPATH")
        return {
            "FAKE_NVML": str(self.path),
            "PYTHONPATH": os.pathsep.join([str(FAKE_NVML), *([before] if before else [])]),
        }


def gpu(number: int, **more: Any) -> dict[str, Any]:
    return {"uuid": f"GPU-{number:08d}-aaaa-bbbb-cccc-000000000000", **more}
