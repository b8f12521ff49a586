"""Triton's interpreter, which runs kernels on a CPU: chosen in ``conftest`` for the whole process, before Triton is
imported. What is compiled in tests is so in processes of their own. It cuts fp32 off where a card rounds to bf16: here
it rounds.

A file of tests that launch kernels imports ``interpreted``, and is skipped where Triton is missing. No case may be in
bf16: the interpreter's ``dot`` is wrong there.
"""

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")

DTYPES = [torch.float32, torch.float16]
CODEC_OF = {torch.float32: "fp32", torch.float16: "fp16"}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's language is exchanged for the interpreter's once a test, not again for every function that a kernel
    calls, which took a quarter of the time.

    Loop bounds are read as scalars: the interpreter reads them with ``int(array of one)``, which numpy refuses from 2.4
    on.
    """
    cut = interpreter._convert_float

    def convert(x: Any, of: Any, to: Any, rounding: Any) -> Any:
        if (of, to) != (tl.float32, tl.bfloat16):
            return cut(x, of, to, rounding)
        return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.uint16).numpy().reshape(x.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    scope = interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    monkeypatch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
    yield
    scope.restore()
