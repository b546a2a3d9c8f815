"""cohere: vectors of every type and length, by both versions of the API, chat, and an error.

python use_cohere.py http://127.0.0.1:8000 MODEL EMBEDDER
"""

import base64
import sys

import cohere
import numpy as np

TEXTS = ["The ship left at dawn.", "She baked bread.", "A ship sailed in the morning."]


def main(url: str, model: str, embedder: str) -> None:
    newer = cohere.ClientV2(api_key="none", base_url=url)
    older = cohere.Client(api_key="none", base_url=url)
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    for client in (newer, older):
        reply = client.embed(
            texts=TEXTS, model=embedder, input_type="search_document", embedding_types=types
        )
        vectors = np.array(reply.embeddings.float_, np.float32)
        assert vectors.shape == (3, 384)
        np.testing.assert_allclose(vectors @ vectors[0] > 0.5, [True, False, True])
        decoded = [np.frombuffer(base64.b64decode(each), "<f4") for each in reply.embeddings.base64]
        np.testing.assert_array_equal(decoded, vectors)
        int8 = np.array(reply.embeddings.int8)
        np.testing.assert_array_equal(int8 + 128, reply.embeddings.uint8)
        np.testing.assert_array_less(np.abs((int8 + 1) / 127.5 - vectors), 0.51 / 127.5)
        bits = np.unpackbits(np.array(reply.embeddings.ubinary, np.uint8), axis=1)
        np.testing.assert_array_equal(bits, vectors > 0)
        np.testing.assert_array_equal(
            np.array(reply.embeddings.binary) + 128, reply.embeddings.ubinary
        )
        assert reply.meta.billed_units.input_tokens > 9
    print("vectors of every type")

    floats = older.embed(texts=TEXTS, model=embedder, input_type="search_query").embeddings
    np.testing.assert_array_equal(np.array(floats, np.float32), vectors)
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    short = newer.embed(
        inputs=inputs, model=embedder, input_type="clustering", output_dimension=64
    ).embeddings.float_
    cut = vectors[:, :64] / np.linalg.norm(vectors[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(short, cut, atol=1e-6)
    print("lists of floats, and shorter vectors of inputs in parts")

    refusal = ""
    try:
        newer.embed(images=["data:image/png;base64,AA"], model=embedder, input_type="image")
    except cohere.BadRequestError as error:
        refusal = error.body["message"]
    assert refusal == "images are not supported; send texts"
    print("a refusal of images")

    asked = {"model": model, "messages": [{"role": "user", "content": "Tell me of a king."}]}
    reply = newer.chat(**asked, max_tokens=20, temperature=0)
    events = list(newer.chat_stream(**asked, max_tokens=20, temperature=0))
    deltas = [event.delta.message.content for event in events if event.type == "content-delta"]
    assert "".join(each.text or "" for each in deltas) == reply.message.content[-1].text
    assert events[-1].delta.finish_reason == reply.finish_reason
    assert events[-1].delta.usage.tokens == reply.usage.tokens
    print("a reply, whole and as a stream")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
