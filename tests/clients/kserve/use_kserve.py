"""KServe's own client: both protocols over HTTP, and the second one over gRPC.

python use_kserve.py http://127.0.0.1:8000 MODEL EMBEDDER GRPC_PORT
"""

import asyncio
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

TEXTS = ["The ship left at dawn.", "She baked bread."]


def question(model: str, output: str, *, binary: bool) -> Any:
    """A request with the texts."""
    given = InferInput("inputs", [2], "BYTES")
    given.set_data_from_numpy(np.array(TEXTS, np.object_), binary_data=binary)
    return InferRequest(
        model_name=model,
        infer_inputs=[given],
        request_outputs=[RequestedOutput(output)],
        parameters={"priority": 1},
    )


async def main(url: str, embedder: str, port: str) -> None:
    """Every form of a request has the same answer."""
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    rpc = InferenceGRPCClient(f"127.0.0.1:{port}")
    answers = []
    for binary in (False, True):
        request = question(embedder, "embedding", binary=binary)
        answers.append(await rest.infer(url, request, model_name=embedder))
        answers.append(await rpc.infer(question(embedder, "embedding", binary=binary)))
    arrays = [each.outputs[0].as_numpy() for each in answers]
    assert all(np.array_equal(each, arrays[0]) for each in arrays)
    assert await rest.is_server_ready(url)
    assert await rpc.is_server_ready()
    assert await rpc.is_model_ready(embedder)
    first = InferenceRESTClient(RESTConfig(protocol="v1"))
    reply = await first.infer(url, {"instances": TEXTS}, model_name=embedder)
    assert len(reply["predictions"]) == 2
    print("vectors over HTTP and gRPC, as JSON and as bytes, and predictions")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[3], sys.argv[4]))
