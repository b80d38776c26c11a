"""What to change where a script ends with an error of torch that says what is wrong, but not what to do."""

from __future__ import annotations

import re

from ...core.failures.backend_texts import is_out_of_memory

_WITHOUT_GPU = (
    "put if torch.cuda.is_available(): before torch.cuda.set_device(...), and "
    'device = "cuda" if torch.cuda.is_available() else "cpu" instead of .cuda(); leave device_ids out'
)
_USUAL = {
    r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs": (
        'torch sees no GPU for NCCL here: write "gloo" where the script says "nccl", or leave that and start with '
        f"farandole run --backend farandole; where the script names the GPU, {_WITHOUT_GPU}"
    ),
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available|_cuda_setDevice": (
        f"torch sees no GPU here: {_WITHOUT_GPU}"
    ),
    r"device_ids and output_device arguments only work": (
        "DistributedDataParallel takes device_ids and output_device for a GPU: leave them out where there is none"
    ),
    r"terminate called without an active exception": (
        "threads of torch were still at work when the process ended: call "
        "torch.distributed.destroy_process_group() at the script's end"
    ),
    r"EOFError: EOF when reading a line|BdbQuit": (
        "ranks have no terminal, and no stdin to read: input() and breakpoint() work with farandole run -np 1 "
        "in a terminal, which its rank inherits"
    ),
    r"mixed dtype \(CPU\)": (
        "a norm met an input in float32 and parameters in bfloat16: is there a buffer in float32 (plan: "
        "bf16_parameters leaves buffers as they are)? Cast what it is multiplied with, x * self.scale.to(x.dtype)"
    ),
    r"got mixed torch\.Tensor and DTensor": (
        "at zero = 3 a sharded parameter is a DTensor: take a sum over these before the forward pass, add its "
        "full_tensor() to the loss, and sum over other tensors (experts) apart"
    ),
}
"""By the text of an error."""


LESS_MEMORY = (
    "take a smaller batch, or --set recompute=blocks --set zero=3; farandole estimate says before a run what fits"
)
_GPU = re.compile(r"(GPU \d+) has a total capacity of ([\d.]+ \w+)")


def remedy_of(cause: str, memory_limit: str = "") -> str:
    """Return what to change; nothing where that is not known.

    Args:
        cause: an error's line, or all that it wrote.
        memory_limit: the memory that the process might take, as words; empty: not known.
    """
    usual = next((remedy for text, remedy in _USUAL.items() if re.search(text, cause)), "")
    if usual or not is_out_of_memory(cause):
        return usual
    gpu = _GPU.search(cause)
    limit = f"the {gpu[2]} of {gpu[1]}" if gpu else f"the limit of {memory_limit}" if memory_limit else ""
    return f"out of memory{' at ' * bool(limit)}{limit}: {LESS_MEMORY}"
