"""The tagger of personal data: the masked model's body, fine-tuned on made-up texts.

No text of a person is read: sentences of `personal_texts.txt` get values of `personal_values`, and
stand among sentences of the corpus that have none. Texts begin and end anywhere, as the windows do
in which a stream is read.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    ModernBertConfig,
    ModernBertForTokenClassification,
    PreTrainedTokenizerFast,
)

from training.data import read_definitions
from training.personal_values import FILLERS, values_of
from training.sentiment import pad
from training.shipped import read_weights

LABELS = ("PERSON", "EMAIL", "PHONE", "CARD", "IBAN", "ADDRESS", "IP", "ID", "KEY")
LEARNING_RATE = 8e-4
DROPOUT = 0.1
BATCH = 32
MAX_TOKENS = 160
PLAIN_SHARE = 0.25
"""Share of texts that are sentences of the corpus alone."""
_IGNORED = -100
_TEXTS = Path(__file__).parent / "personal_texts.txt"
_SLOT = re.compile(r"\{([A-Za-z]+)\}")
_PARTS_OF_NAMES = {"FIRST": "PERSON", "LAST": "PERSON"}
_INTENTS_FILE = "intents-train.tsv"
_TAGS = ["O", *(f"{place}-{label}" for label in LABELS for place in "BI")]


@dataclass(frozen=True, slots=True)
class Entity:
    """Personal data in a text: its label, first character, and the character behind it."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Text:
    """A text and the personal data in it, in order."""

    text: str
    entities: tuple[Entity, ...] = ()


class Writer:
    """Writes texts with personal data, and without.

    Args:
        corpus: folder with sentences that have none.
        seed: of what is drawn.
    """

    def __init__(self, corpus: Path, seed: int) -> None:
        self._chance = random.Random(seed)
        lines = _TEXTS.read_text(encoding="utf-8").splitlines()
        self._templates = [each.replace("\\n", "\n") for each in lines if not each.startswith("#")]
        intents = (corpus / _INTENTS_FILE).read_text(encoding="utf-8").splitlines()
        self._plain = [each.rsplit("\t", 1)[0] for each in intents if each]
        self._plain += [each.strip() for each in read_definitions(corpus, 0.1, seed)]
        words = {w for text in self._plain for w in re.findall(r"\b[a-z]{3,10}\b", text)}
        self._words = sorted(words)
        self._values = values_of(self._words)

    def texts(self) -> Iterator[Text]:
        """Texts without end."""
        while True:
            yield self._cut(self._joined())

    def _joined(self) -> Text:
        """Some sentences, one behind the other."""
        chance = self._chance
        if chance.random() < PLAIN_SHARE:
            parts = [Text(chance.choice(self._plain)) for _ in range(chance.randint(1, 3))]
        else:
            parts = [self._filled() for _ in range(chance.choice((1, 1, 2, 3, 4)))]
            if chance.random() < 0.4:
                parts.insert(chance.randint(0, len(parts)), Text(chance.choice(self._plain)))
        joint = chance.choice((" ", " ", " ", "\n", ". ", ", "))
        text, entities = "", []
        for part in parts:
            text += joint if text else ""
            entities += [_moved(each, len(text)) for each in part.entities]
            text += part.text
        if chance.random() < 0.1:
            text = text.lower()
        elif chance.random() < 0.03:
            text = text.upper()
        return Text(text, tuple(entities))

    def _template(self) -> str:
        """A sentence with slots; a third of them stand anywhere in a sentence of the corpus."""
        chance = self._chance
        if chance.random() > 0.35:
            return chance.choice(self._templates)
        words = re.sub(r"[{}]", "", chance.choice(self._plain)).split(" ")
        at = chance.randint(0, len(words))
        kind = chance.choice(("PERSON", "PERSON", "PERSON", *LABELS))
        slot = chance.choice(("{%s}", "{%s}", "{%s},", "({%s})", "- {%s}", ": {%s}", '"{%s}"'))
        return " ".join((*words[:at], slot % kind, *words[at:]))

    def _filled(self) -> Text:
        """A sentence whose slots have values."""
        template = self._template()
        text, entities, behind = "", [], 0
        for slot in _SLOT.finditer(template):
            text += template[behind : slot.start()]
            behind = slot.end()
            kind = slot[1]
            if kind not in self._values:
                text += FILLERS[kind](self._chance)
                continue
            value = self._values[kind](self._chance)
            label = _PARTS_OF_NAMES.get(kind, kind)
            entities.append(Entity(label, len(text), len(text) + len(value)))
            text += value
        return Text(text + template[behind:], tuple(entities))

    def _cut(self, text: Text) -> Text:
        """A third of texts begin or end within a sentence, but never within personal data."""
        places = [match.start() for match in re.finditer(r"\S+", text.text)]
        inside = [range(each.start + 1, each.end) for each in text.entities]
        places = [at for at in places if not any(at in each for each in inside)]
        if len(places) < 4 or self._chance.random() > 0.35:
            return text
        start, end = 0, len(text.text)
        if self._chance.random() < 0.6:
            start = self._chance.choice(places[: len(places) // 2])
        if self._chance.random() < 0.6:
            end = self._chance.choice(places[len(places) // 2 :])
        kept = [each for each in text.entities if start <= each.start and each.end <= end]
        return Text(text.text[start:end], tuple(_moved(each, -start) for each in kept))


def _moved(entity: Entity, by: int) -> Entity:
    return Entity(entity.label, entity.start + by, entity.end + by)


def build_model(config: ModernBertConfig, bundle: Path | None) -> ModernBertForTokenClassification:
    """A model with a tag for each token, whose body has the weights of an exported bundle.

    Args:
        config: the masked model's.
        bundle: of any task with that body; None for random weights.
    """
    changes: dict[str, Any] = {
        "num_labels": len(_TAGS),
        "id2label": dict(enumerate(_TAGS)),
        "label2id": {tag: i for i, tag in enumerate(_TAGS)},
        "mlp_dropout": DROPOUT,
        "classifier_dropout": DROPOUT,
        "attn_implementation": "eager",
    }
    config.update(changes)
    model = ModernBertForTokenClassification(config)
    if bundle is not None:
        weights = read_weights(bundle)
        own = model.state_dict()
        if any(weights[name].shape != own[name].shape for name in weights):  # of another head
            weights = {k: v for k, v in weights.items() if k.startswith("model.")}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected, unexpected
        assert not any(name.startswith("model.") for name in missing), missing
    return model


def encode(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[Text]
) -> list[tuple[list[int], list[int]]]:
    """Token ids of each text with [CLS] and [SEP], cut to `MAX_TOKENS`, and the tags of them."""
    encoded = tokenizer(
        [each.text for each in texts],
        truncation=True,
        max_length=MAX_TOKENS,
        return_offsets_mapping=True,
    )
    rows = []
    for text, ids, offsets in zip(
        texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        tags = [_IGNORED if start == end else 0 for start, end in offsets]
        for entity in text.entities:
            first = _TAGS.index(f"B-{entity.label}")
            for i, (start, end) in enumerate(offsets):
                if start < end and entity.start <= start < entity.end:
                    tags[i] = first
                    first = _TAGS.index(f"I-{entity.label}")
        rows.append((list(ids), tags))
    return rows


class PersonalObjective:
    """Cross-entropy of the tags, on texts that are written anew for each batch."""

    def __init__(
        self,
        model: ModernBertForTokenClassification,
        tokenizer: PreTrainedTokenizerFast,
        texts: Iterator[Text],
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._pad = int(tokenizer.pad_token_id)
        self._texts = texts
        self._batches: list[list[tuple[list[int], list[int]]]] = []

    def batch_loss(self, progress: float) -> tuple[Tensor, int]:
        if not self._batches:
            rows = encode(self._tokenizer, [next(self._texts) for _ in range(16 * BATCH)])
            rows.sort(key=lambda row: len(row[0]))
            self._batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
            random.Random(len(rows[0][0])).shuffle(self._batches)
        batch = self._batches.pop()
        inputs, attention = pad([ids for ids, _ in batch], self._pad)
        longest = inputs.shape[1]
        tags = torch.tensor([row + [_IGNORED] * (longest - len(row)) for _, row in batch])
        device = self.model.device
        logits = self.model(
            input_ids=inputs.to(device), attention_mask=attention.to(device)
        ).logits.float()
        loss = functional.cross_entropy(
            logits.flatten(0, 1), tags.flatten().to(device), ignore_index=_IGNORED
        )
        return loss, int(attention.sum())


@torch.no_grad()
def find(
    model: ModernBertForTokenClassification, tokenizer: PreTrainedTokenizerFast, text: str
) -> list[Entity]:
    """The personal data that the model finds in a text: runs of tokens of one label."""
    model.eval()
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0].tolist()
    inputs = {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}
    tags = [_TAGS[i] for i in model(**inputs).logits[0].argmax(-1).tolist()]
    found: list[Entity] = []
    for tag, (start, end) in zip(tags, offsets, strict=True):
        if start == end or tag == "O":
            continue
        place, label = tag.split("-", 1)
        last = found[-1] if found else None
        goes_on = last is not None and last.label == label and not text[last.end : start].strip()
        if last is not None and goes_on and place == "I":
            found[-1] = Entity(label, last.start, end)
        else:
            found.append(Entity(label, start, end))
    return found


def measure(
    model: ModernBertForTokenClassification,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[Text],
) -> dict[str, tuple[float, float]]:
    """Precision and recall of each label, by entities whose label, start and end are right."""
    counts = {label: [0, 0, 0] for label in LABELS}  # found, there, both
    for text in texts:
        found = set(find(model, tokenizer, text.text))
        for entity in found:
            counts[entity.label][0] += 1
        for entity in text.entities:
            counts[entity.label][1] += 1
            counts[entity.label][2] += entity in found
    return {
        label: (both / max(found, 1), both / max(there, 1))
        for label, (found, there, both) in counts.items()
    }


def shown(
    model: ModernBertForTokenClassification, tokenizer: PreTrainedTokenizerFast, text: str
) -> str:
    """A text with what was found marked."""
    for entity in reversed(find(model, tokenizer, text)):
        value = text[entity.start : entity.end]
        text = f"{text[: entity.start]}[{value}]({entity.label}){text[entity.end :]}"
    return text
