"""Late interaction: a query and a document compared by the vectors of their tokens (MaxSim).

Khattab and Zaharia, SIGIR 2020, "ColBERT", equation 3.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import about
from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks.embed_all import read_for_interaction
from maskdial.masked.tasks.logits import finite
from maskdial.masked.tasks.task import TaskModel, Truncation

SECONDS_PER_PRODUCT = 0.1e-9
"""Of two numbers, with what is read and compared for it."""


def read_interaction(
    model: TaskModel, query: str, documents: Sequence[str], truncation: Truncation
) -> tuple[list[MaskedInput], int]:
    """Tokenizes a query and documents, each with its prompt, as inputs of their own.

    Returns:
        The inputs, the query first, and how many tokens were cut off.

    Raises:
        ValidationError: a text is too long.
    """
    embedding = model.manifest.embedding
    assert embedding is not None, "every bundle for this task has one"
    prompts = embedding.prompts
    with about("query"):
        text = prompts.get("query", "") + query
        read, num_truncated = read_for_interaction(model, text, truncation, is_query=True)
    inputs = [read]
    for index, document in enumerate(documents):
        with about("texts", index):
            text = prompts.get("document", "") + document
            read, num_cut = read_for_interaction(model, text, truncation, is_query=False)
        inputs.append(read)
        num_truncated += num_cut
    return inputs, num_truncated


def max_sim(
    query: NDArray[np.float32], documents: Iterable[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """For each vector of the query the largest product with one of a document, summed.

    Each document is multiplied alone, so its score does not depend on the others.

    Args:
        query: float32 (num_query_tokens, dimension).
        documents: float32 (num_tokens, dimension) each; one without any vector scores 0.

    Returns:
        A score for each document, float32.

    Raises:
        InferenceError: a vector has values that are not finite numbers.
    """
    finite(query, "embeddings")
    scores = []
    for document in documents:
        score = np.float32(0)
        if len(query) and len(document):
            score = (query @ finite(document, "embeddings").T).max(axis=1).sum()
        scores.append(score)
    return np.array(scores, np.float32)
