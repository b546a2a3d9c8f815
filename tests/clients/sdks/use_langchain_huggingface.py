"""langchain-huggingface: the embeddings of a text-embeddings-inference server.

python use_langchain_huggingface.py http://127.0.0.1:8000 MODEL EMBEDDER
"""

import asyncio
import sys

import numpy as np
from huggingface_hub import AsyncInferenceClient, InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings

TEXTS = ["The ship left at dawn.", "She baked bread.\nIt was good."]


def embeddings_of(url: str, **keywords: object) -> HuggingFaceEndpointEmbeddings:
    """Since 1.2 it takes no address itself, only clients that have one."""
    found = HuggingFaceEndpointEmbeddings(
        model="own/server", huggingfacehub_api_token="none", **keywords
    )
    found.client, found.async_client = InferenceClient(url), AsyncInferenceClient(url)
    return found


def main(url: str, embedder: str) -> None:
    named = embeddings_of(f"{url}/models/{embedder}")
    vectors = np.array(named.embed_documents(TEXTS))
    assert vectors.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(named.embed_query(TEXTS[0]), vectors[0])
    print("embeddings of the named model")

    route = embeddings_of(f"{url}/embed", model_kwargs={"truncate": True})
    np.testing.assert_array_equal(asyncio.run(route.aembed_documents(TEXTS)), vectors)
    print("and of the only one that embeds, with a parameter")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3])
