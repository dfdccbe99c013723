"""Calls functions of Triton kernel modules under Triton's interpreter, for a test process that talks to it over stdin and stdout.

A process of its own, as Triton reads TRITON_INTERPRET when a kernel is decorated. A request is (module, function, arguments,
keywords); the answer is (result, arguments, keywords), or the text of an exception. Modules that are paths of files are loaded
with a stand-in for ``vllm.triton_utils``, so that vLLM's own kernels need none of vLLM.
"""

import importlib
import importlib.util
import io
import os
import struct
import sys
import traceback
import types

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def convert_float(x: np.ndarray, source: tl.dtype, target: tl.dtype, _: object) -> np.ndarray:
    """To nearest even, fp8 saturated, as the hardware does it; the interpreter's own conversion truncates."""
    value = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy()).view(_TORCH[source]).float()
    if target is tl.float8e4nv:
        value = value.clamp(-448.0, 448.0)
    out = value.to(_TORCH[target])
    return out.view(torch.uint8).numpy().view(_BITS[out.element_size()]).reshape(x.shape)


def load(module: str) -> types.ModuleType:
    if not module.endswith(".py"):
        return importlib.import_module(module)
    utils = types.ModuleType("vllm.triton_utils")
    utils.tl, utils.triton = tl, triton  # type: ignore[attr-defined]
    sys.modules["vllm.triton_utils"] = utils
    spec = importlib.util.spec_from_file_location(os.path.basename(module)[:-3], module)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints must not end up between the answers
    interpreter._convert_float = convert_float
    modules: dict[str, types.ModuleType] = {}
    while header := sys.stdin.buffer.read(8):
        request = sys.stdin.buffer.read(struct.unpack("q", header)[0])
        module, function, args, kwargs = torch.load(io.BytesIO(request), weights_only=False)
        answer: object
        try:
            found = modules.get(module) or modules.setdefault(module, load(module))
            answer = getattr(found, function)(*args, **kwargs), args, kwargs
        except Exception:
            answer = traceback.format_exc()
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        answers.write(struct.pack("q", buffer.tell()) + buffer.getvalue())
        answers.flush()


if __name__ == "__main__":
    main()
