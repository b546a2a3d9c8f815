"""laya's RemoteRouter: a choice, a score and a noul, several requests, and a refusal.

python use_laya.py http://127.0.0.1:8000 MODEL
"""

import math
import sys
from typing import Any

from laya.mcp.remote import RemoteError, RemoteRouter

STATE = {"subject": "Two charges", "body": "We were billed twice for March."}
QUESTIONS: dict[str, Any] = {
    "department": {
        "type": "choice",
        "instructions": "Which department should handle this?",
        "criteria": {"billing": "invoices, refunds", "technical": None},
    },
    "urgency": {"type": "score", "criteria": ["not urgent", "soon", "blocking"]},
    "leaves": {"type": "noul", "instructions": "Does the customer threaten to leave?"},
}


def main(url: str, model: str) -> None:
    router = RemoteRouter(url)
    assert router.health()["status"] == "ready"
    reply = router.predict(STATE, QUESTIONS, model=model)
    answers = reply["answers"]
    for name, each in answers.items():
        assert each["type"] == QUESTIONS[name]["type"]
        if each["type"] != "noul":
            assert math.isclose(sum(each["probabilities"].values()), 1)
    assert answers["department"]["choice"] in ("billing", "technical")
    assert 0 <= answers["urgency"]["score"] <= 2
    assert 0 < answers["leaves"]["noul"] < 1
    assert reply["usage"]["input_tokens"] > 100
    print("a choice, a score and a noul")

    requests = [{"state": each, "questions": QUESTIONS, "model": model} for each in (STATE, "Hi.")]
    first, second = router.predict_batch(requests)
    assert first["answers"] == answers != second["answers"]
    print("several requests, with the same answers")

    refusal = ""
    try:
        router.predict(STATE, {"empty": {"type": "choice", "criteria": {}}}, model=model)
    except RemoteError as error:
        refusal = error.code
    assert refusal == "invalid_request"
    print("a refusal of a choice without options")


if __name__ == "__main__":
    main(*sys.argv[1:])
