"""What a profile of ONNX Runtime says of passes."""

from typing import Any

from loadtests.engine.device import split, summarize
from loadtests.engine.vulkan import Traffic


def run(start: int, duration: int) -> dict[str, Any]:
    return {"cat": "Session", "name": "model_run", "ts": start, "dur": duration, "args": {}}


def node(start: int, kind: str, provider: str = "WebGpu", size: int = 0) -> dict[str, Any]:
    args = {
        "op_name": kind,
        "provider": f"{provider}ExecutionProvider",
        "output_size": str(size),
    }
    return {"cat": "Node", "name": f"{kind}_kernel_time", "ts": start, "dur": 1, "args": args}


def test_passes_are_counted_apart() -> None:
    """ONNX Runtime writes a pass after its operators."""
    fence = {"cat": "Node", "name": "fence", "ts": 12, "dur": 1, "args": {}}
    first = [node(11, "Shape", "CPU"), fence, node(12, "MemcpyFromHost", size=8), run(10, 5)]
    second = [node(21, "MatMul"), node(22, "MemcpyToHost", size=16), node(23, "Add"), run(20, 1500)]
    passes = split([{"cat": "Session", "name": "model_loading", "ts": 0}, *second, *first])
    assert [len(each) for each in passes] == [3, 4]
    row = summarize("decode", 2, 1, Traffic(12, 24, 200), passes[0])
    assert (row.on_device, row.on_cpu, row.round_trips) == (0, 1, 0)
    assert (row.submissions, row.bytes_up, row.bytes_down) == (12, 24, 200)
    row = summarize("prefill", 1, 16, None, passes[1])
    assert (row.on_device, row.on_cpu, row.round_trips) == (2, 0, 1)
    assert (row.submissions, row.bytes_up, row.ms) == (None, None, 1.5)
