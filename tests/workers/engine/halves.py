"""Numbers of two bytes, as the bits that the CUDA flavour takes and gives, and float32 arrays of what they say."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.models.description import CudaType
from workers.models.weights import bfloat16_to_float32, float32_to_bfloat16

Array = NDArray[Any]

ENCODE: Mapping[CudaType, Callable[[Array], Array]] = {
    "float16": lambda values: values.astype(np.float16).view(np.uint16),
    "bfloat16": float32_to_bfloat16,
}
DECODE: Mapping[CudaType, Callable[[Array], Array]] = {
    "float16": lambda bits: bits.view(np.float16).astype(np.float32),
    "bfloat16": bfloat16_to_float32,
}
