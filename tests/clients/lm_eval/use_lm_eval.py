"""lm-evaluation-harness: `local-completions` measures what its `hf` backend does.

python use_lm_eval.py http://127.0.0.1:8000 MODEL CHECKPOINT

The model is a bundle of the checkpoint, in fp32.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval

TEXTS = [
    "The old man went down to the river and sat there until the sun was gone.",
    "She said that she would come back before winter, but no one believed her.",
    "It was the best of times, it was the worst of times, and nobody knew why.",
    "A small boat lay on the beach, half full of sand, and two boys were digging it out.",
    "Nothing was heard in the house except the clock, which had never been so loud.",
    "If the letter comes today, I shall answer it at once; if not, I shall leave.",
]
CUTS = [2, 3, 5, 8, 9, 11]  # words of each text that are its context
MAX_DIFFERENCE = 1e-4  # nats


def main(url: str, model: str, checkpoint: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tasks = write_tasks(Path(folder))
        served = evaluate(
            "local-completions",
            tasks,
            model=model,
            base_url=f"{url}/v1/completions",
            tokenizer=checkpoint,
            max_length=512,
            num_concurrent=4,
            add_bos_token=True,  # as `hf` does by default, where the tokenizer does
        )
        reference = evaluate("hf", tasks, pretrained=checkpoint, dtype="float32", device="cpu")
    furthest = 0.0
    for mine, torch in zip(served["likelihood"], reference["likelihood"], strict=True):
        (((log_likelihood, is_greedy),),) = mine
        (((expected, expected_greedy),),) = torch
        furthest = max(furthest, abs(float(log_likelihood) - float(expected)))
        assert is_greedy == expected_greedy
    assert 0 < furthest < MAX_DIFFERENCE, furthest
    print(f"{len(TEXTS)} log-likelihoods, within {furthest:.1e} of torch")
    assert served["writing"] == reference["writing"]
    print(f"{len(TEXTS)} continuations, token by token those of torch")


def write_tasks(folder: Path) -> list[dict[str, Any]]:
    """Two tasks over the same texts: their endings scored, and their beginnings continued."""
    documents = folder / "documents.jsonl"
    with documents.open("w", encoding="utf-8") as lines:
        for text, cut in zip(TEXTS, CUTS, strict=True):
            words = text.split()
            document = {"text": " ".join(words[:cut]), "ending": " " + " ".join(words[cut:])}
            lines.write(json.dumps(document) + "\n")
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{ending}}",
    }
    return [
        shared
        | {
            "task": "likelihood",
            "output_type": "loglikelihood",
            "metric_list": [{"metric": "acc"}],
        },
        shared
        | {
            "task": "writing",
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


def evaluate(backend: str, tasks: list[dict[str, Any]], **arguments: Any) -> dict[str, list[Any]]:
    """The replies to each task's documents, in their order."""
    results = lm_eval.simple_evaluate(
        model=backend, model_args=arguments, tasks=tasks, batch_size=4, bootstrap_iters=0
    )
    return {
        task: [sample["resps"] for sample in sorted(samples, key=lambda each: each["doc_id"])]
        for task, samples in results["samples"].items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
