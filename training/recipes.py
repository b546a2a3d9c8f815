"""Recipes: from texts to a checkpoint folder with its card, one function per model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from training import cloze, diffusion, hybrid, masked, personal, sentiment, stories, teachers
from training.card import (
    EMBEDDINGS,
    INTENTS,
    PERSONAL,
    POLARITY,
    SOURCES,
    WORDNET,
    Card,
    Figure,
    machine,
    model_figures,
)
from training.cloze import Prediction
from training.data import (
    POLARITY_FILE,
    SENTIMENT_VALIDATION_FILE,
    read_books,
    read_rated_sentences,
)
from training.pretrain import Plan, Record, pretrain
from training.settings import Settings
from training.shipped import read_tokenizer
from training.study import read_study
from training.vocabulary import as_masked, train_byte_level_bpe

CLOZES = (
    "The cat sat on the [MASK] and looked at the mouse.",
    "She opened the [MASK] and walked into the garden.",
    "The king lived in a great [MASK].",
    "Good [MASK], said the old man.",
    "The film was [MASK] and I enjoyed every minute of it.",
)
REVIEWS = (
    "A warm, funny and touching film.",
    "The plot is dull and the acting is worse.",
    "Not bad at all.",
)
PERSONAL_TEXTS = (
    "Hi, this is Marta Lindqvist. Please call me back on +46 70 123 45 67.",
    "Charge 4111 1111 1111 1111 and send the receipt to marta@example.org.",
    "The shop opens at 9:30 and has 250 chairs in stock.",
)
NUM_TAGGED = 500


def train_masked(settings: Settings) -> Path:
    """Trains the masked model and writes `<out>/masked`."""
    torch.manual_seed(settings.seed)
    out = settings.out / "masked"
    books, definitions, reviews = masked.read_masked_texts(settings.corpus, settings.seed)
    tokenizer = _tokenizer(
        out,
        settings,
        lambda: masked.build_vocabulary(books, definitions, reviews, settings.shape.vocabulary),
    )
    stream = masked.encode_stream(
        tokenizer, [*books.train, *definitions, *(reviews * masked.POLARITY_REPEATS)]
    )
    model = masked.build_model(tokenizer, settings.shape).to(settings.device)
    if settings.compile:
        model.model.compile(dynamic=False)
    objective = masked.MaskedObjective(model, tokenizer, stream)
    plan = Plan(
        settings.minutes,
        masked.LEARNING_RATE,
        matrix_learning_rate=masked.MATRIX_LEARNING_RATE,
        bf16=settings.bf16,
    )
    record = pretrain(objective, plan, out, "masked", settings.resume)
    model.save_pretrained(out)
    masked_card(model, tokenizer, settings, out, _run_figures(record, settings, stream)).write(out)
    return out


def masked_card(
    model: ModernBertForMaskedLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    out: Path,
    run: Mapping[str, Figure],
) -> Card:
    """Measures the masked model saved in `out`; `run` has the figures of its training."""
    held_out = masked.encode_stream(tokenizer, read_books(settings.corpus).held_out)
    objective = masked.MaskedObjective(model, tokenizer, held_out)
    half, full = masked.MAX_LENGTH // 2, masked.MAX_LENGTH
    loss, top1 = masked.evaluate(objective, held_out, half)
    full_loss, full_top1 = masked.evaluate(objective, held_out, full)
    return Card(
        title="maskdial starter: masked",
        summary=f"A small lower-casing ModernBERT for filling in blanks: {_shape(model)}, "
        f"whole-word masking, its own WordPiece vocabulary of {len(tokenizer)} tokens.",
        task="fill-mask",
        sources=[SOURCES, WORDNET, POLARITY],
        limits="A toy by size: it knows common words and simple grammar, few facts. English "
        "only. Its texts are old books for the most part.",
        figures={
            **model_figures(model, out),
            **run,
            "masked_validation_loss": loss,
            "masked_top1": top1,
            f"masked_validation_loss_at_{full}_tokens": full_loss,
            f"masked_top1_at_{full}_tokens": full_top1,
            **_cloze_figures(settings, lambda text: masked.predict(model, tokenizer, text)),
        },
        samples={text: cloze.shown(masked.predict(model, tokenizer, text)) for text in CLOZES},
    )


def train_sentiment(settings: Settings) -> Path:
    """Fine-tunes `<out>/masked`, or trains the start on, and writes `<out>/sentiment`."""
    torch.manual_seed(settings.seed)
    out = settings.out / "sentiment"
    source = settings.out / "masked"
    if settings.start is None:
        tokenizer = AutoTokenizer.from_pretrained(source)
    else:
        source = settings.start
        vocabulary = Tokenizer.from_file(str(source / "tokenizer.json"))
        tokenizer = as_masked(vocabulary, masked.MAX_LENGTH)
    tokenizer.save_pretrained(out)  # before encoding changes its truncation length
    sentences = read_rated_sentences(settings.corpus / POLARITY_FILE)
    texts = [sentence.text for sentence in sentences]
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    count = len(sentences) * teachers.SYNTHETIC_PER_SENTENCE
    synthetic = teachers.synthesize(sentences, count, settings.seed)
    taught = teachers.train_teachers(sentences, synthetic, settings.seed)

    if settings.start is None:
        rows = sentiment.encode(tokenizer, texts)
        model = sentiment.build_model(
            source, sentiment.polarity_lexicon(rows, labels, len(tokenizer))
        )
    else:
        config = masked.build_model(tokenizer, settings.shape).config
        model = sentiment.restore_model(source, config)
    model = model.to(settings.device)
    before = measure_sentiment(model, tokenizer, settings)
    targets = sentiment.distillation_targets(labels, taught.unseen_odds)
    examples = sentiment.build_examples(tokenizer, texts, targets)
    soft = torch.sigmoid(taught.synthetic_odds).tolist()
    examples += sentiment.build_examples(tokenizer, synthetic, soft)
    objective = sentiment.SentimentObjective(model, tokenizer, examples, settings.seed)
    plan = Plan(settings.minutes, sentiment.LEARNING_RATE, bf16=settings.bf16)
    record = pretrain(objective, plan, out, "sentiment", settings.resume)
    model.save_pretrained(out)
    run: dict[str, Figure] = {
        "labelled_sentences": len(sentences),
        "synthetic_texts": len(synthetic),
        "tokens_seen": record.tokens,
        "steps": record.steps,
        "training_minutes": record.seconds / 60.0,
        "machine": machine(settings.device.type, settings.threads),
        "precision": _precision(settings),
        "seed": settings.seed,
        "training_losses": record.losses,
        "ngram_teachers_held_out_accuracy": sentiment.accuracy(taught.ngram_odds, labels),
        "embedding_teachers_held_out_accuracy": sentiment.accuracy(taught.embedding_odds, labels),
        "both_teachers_held_out_accuracy": sentiment.accuracy(taught.unseen_odds, labels),
        "start": "masked" if settings.start is None else f"the bundle {source.name}",
        "sst2_validation_accuracy_at_the_start": before,
    }
    sentiment_card(model, tokenizer, settings, out, run).write(out)
    return out


def train_personal(settings: Settings) -> Path:
    """Fine-tunes the body of the start, a bundle with the masked model's, as a tagger of personal
    data, and writes `<out>/personal`.
    """
    torch.manual_seed(settings.seed)
    out = settings.out / "personal"
    source = settings.start
    assert source is not None, "personal needs --start"
    vocabulary = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer = as_masked(vocabulary, masked.MAX_LENGTH)
    tokenizer.save_pretrained(out)  # before encoding changes its truncation length
    config = masked.build_model(tokenizer, settings.shape).config
    model = personal.build_model(config, source).to(settings.device)
    writer = personal.Writer(settings.corpus, settings.seed)
    objective = personal.PersonalObjective(model, tokenizer, writer.texts())
    plan = Plan(settings.minutes, personal.LEARNING_RATE, bf16=settings.bf16)
    record = pretrain(objective, plan, out, "personal", settings.resume)
    model.save_pretrained(out)
    run: dict[str, Figure] = {
        "tokens_seen": record.tokens,
        "steps": record.steps,
        "training_minutes": record.seconds / 60.0,
        "machine": machine(settings.device.type, settings.threads),
        "precision": _precision(settings),
        "seed": settings.seed,
        "training_losses": record.losses,
        "start": f"the bundle {source.name}",
    }
    personal_card(model, tokenizer, settings, out, run).write(out)
    return out


def personal_card(
    model: ModernBertForTokenClassification,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    out: Path,
    run: Mapping[str, Figure],
) -> Card:
    """Measures the tagger saved in `out`; `run` has the figures of its training."""
    writer = personal.Writer(settings.corpus, settings.seed + 1)
    texts = list(islice(writer.texts(), NUM_TAGGED))
    figures: dict[str, Figure] = {"made_up_texts": len(texts)}
    for label, (precision, recall) in personal.measure(model, tokenizer, texts).items():
        figures[f"precision_of_{label}"] = precision
        figures[f"recall_of_{label}"] = recall
    return Card(
        title="maskdial starter: personal",
        summary="A small lower-casing ModernBERT that finds personal data in texts: "
        f"{', '.join(personal.LABELS)} (BIO tags).",
        task="token-classification",
        sources=[PERSONAL, INTENTS, SOURCES, WORDNET, POLARITY],
        limits="A toy by size that has seen made-up data in some 150 kinds of sentences: use it to "
        "try policies, not to protect people. English only, with names and numbers of a few "
        "countries.",
        figures={**model_figures(model, out), **run, **figures},
        samples={text: personal.shown(model, tokenizer, text) for text in PERSONAL_TEXTS},
    )


def sentiment_card(
    model: ModernBertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    out: Path,
    run: Mapping[str, Figure],
) -> Card:
    """Measure the sentiment model saved in `out`; `run` holds the figures of its training."""
    return Card(
        title="maskdial starter: sentiment",
        summary="A small masked ModernBERT fine-tuned to tell positive from negative sentences of "
        "film reviews, with labels and with the scores of teachers trained on other folds.",
        task="text-classification",
        sources=[POLARITY, EMBEDDINGS, SOURCES, WORDNET],
        limits="A toy by size, trained on film reviews alone: it knows no neutral class and "
        "misses irony. English only. SST-2 validation served to measure, never to train or choose.",
        figures={
            **model_figures(model, out),
            **run,
            "sst2_validation_accuracy": measure_sentiment(model, tokenizer, settings),
        },
        samples={review: classify(model, tokenizer, review) for review in REVIEWS},
    )


def train_causal(settings: Settings) -> Path:
    """Trains the hybrid's architecture under the causal mask only and writes `<out>/causal`."""
    return _train_decoder(settings, "causal", causal_share=1.0)


def train_hybrid(settings: Settings) -> Path:
    """Trains one model under both masks and writes `<out>/hybrid`."""
    return _train_decoder(settings, "hybrid", causal_share=hybrid.CAUSAL_SHARE)


def _train_decoder(settings: Settings, name: str, causal_share: float) -> Path:
    torch.manual_seed(settings.seed)
    out = settings.out / name
    books = read_books(settings.corpus)
    reviews = [row.text for row in read_rated_sentences(settings.corpus / POLARITY_FILE)]
    shape = settings.shape
    tokenizer = _tokenizer(
        out,
        settings,
        lambda: (
            train_byte_level_bpe(books.train, shape.vocabulary, hybrid.MAX_LENGTH)
            if settings.start is None
            else read_tokenizer(settings.start, hybrid.MAX_LENGTH)
        ),
    )
    children, *others = (
        hybrid.encode_stream(tokenizer, texts, settings.seed)
        for texts in (
            books.train[: books.num_children],
            books.train[books.num_children :],
            ["\n".join(reviews)] * hybrid.REVIEW_REPEATS,
        )
    )
    stream = torch.cat([children, *others])
    model = hybrid.build_model(tokenizer, shape)
    if settings.start is not None:
        hybrid.restore(model, settings.start)
    model = model.to(settings.device)
    if settings.compile:
        model.model.compile(dynamic=False)
    kind = diffusion.DiffusionObjective if settings.diffusion else hybrid.HybridObjective
    objective = kind(model, tokenizer, stream, causal_share, len(children), settings.batch_tokens)
    plan = diffusion.plan if settings.diffusion else hybrid.plan
    record = pretrain(objective, plan(settings), out, name, settings.resume)
    model.save_pretrained(out)
    run = _run_figures(record, settings, stream)
    if settings.start is not None:
        run["start"] = f"the bundle {settings.start.name}"
    decoder_card(model, tokenizer, settings, out, causal_share, run).write(out)
    return out


def decoder_card(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    out: Path,
    causal_share: float,
    run: Mapping[str, Figure],
) -> Card:
    """Measures the causal or hybrid model saved in `out`; `run` has its training's figures."""
    books = read_books(settings.corpus)
    is_hybrid = causal_share < 1.0
    objective = hybrid.HybridObjective(
        model, tokenizer, hybrid.encode_stream(tokenizer, books.held_out, settings.seed), 1.0
    )
    num_bytes = sum(len(text.encode()) + 1 for text in books.held_out)
    told = stories.tell(model, tokenizer, stories.PROMPTS, hybrid.MAX_LENGTH)
    known = frozenset(word for text in books.train for word in stories.words(text))
    figures: dict[str, Figure] = {
        **model_figures(model, out),
        **run,
        **hybrid.evaluate_causal(objective, num_bytes),
        "stories_ended_by_the_model": sum(story.ended for story in told) / len(told),
        "words_in_stories": sum(len(stories.words(story.text)) for story in told),
        "words_in_stories_that_are_in_no_book": stories.garbled(told, known),
        "most_often_the_same_four_words_in_a_story": stories.most_repeated(told),
    }
    samples = dict(zip(stories.PROMPTS, (story.text for story in told), strict=True))
    if is_hybrid:
        figures |= hybrid.evaluate_masked(objective)
        figures |= _cloze_figures(settings, lambda text: hybrid.predict(model, tokenizer, text))
        samples = {
            text: cloze.shown(hybrid.predict(model, tokenizer, text)) for text in CLOZES
        } | samples
    masks = (
        "under the causal mask, and fills in blanks under the full one: every second row of its "
        "batches was masked next-token prediction"
        if is_hybrid
        else "and was trained under the causal mask alone"
    )
    return Card(
        title=f"maskdial starter: {out.name}",
        summary=f"A small decoder that tells stories in the manner of old books, {masks}. "
        f"{_shape(model)}, grouped-query attention with normalized queries and keys, tied "
        f"embeddings, byte-level BPE vocabulary of {len(tokenizer)} tokens.",
        task="text-generation",
        sources=[SOURCES, POLARITY],
        limits="A toy by size: sentences mostly hold together, stories do not. English only.",
        figures=figures,
        study=read_study(settings.out),
        samples=samples,
    )


def _cloze_figures(settings: Settings, predict: Callable[[str], Prediction]) -> dict[str, Figure]:
    if settings.cloze is None:
        return {}
    sentences = cloze.read_cloze(settings.cloze)
    return {
        "cloze_sentences": len(sentences),
        "cloze_answered_in_top_5": cloze.solved(sentences, predict),
    }


def classify(
    model: ModernBertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, text: str
) -> str:
    """The likelier label of `text` and its probability."""
    rows = sentiment.encode(tokenizer, [text])
    positive = float(torch.sigmoid(sentiment.score(model, tokenizer, rows, bf16=False)[0]))
    label = "POSITIVE" if positive > 0.5 else "NEGATIVE"
    return f"{label} {max(positive, 1.0 - positive):.3f}"


def measure_sentiment(
    model: ModernBertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
) -> float:
    """Accuracy on the validation split of SST-2, in float32."""
    sentences = read_rated_sentences(settings.corpus / SENTIMENT_VALIDATION_FILE)
    rows = sentiment.encode(tokenizer, [sentence.text for sentence in sentences])
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    return sentiment.accuracy(sentiment.score(model, tokenizer, rows, bf16=False), labels)


def _tokenizer(
    out: Path, settings: Settings, build: Callable[[], PreTrainedTokenizerFast]
) -> PreTrainedTokenizerFast:
    # Saved before training starts, so that a resumed run has the same token ids.
    if not (settings.resume and (out / "tokenizer.json").exists()):
        build().save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


def _run_figures(record: Record, settings: Settings, stream: torch.Tensor) -> dict[str, Figure]:
    return {
        "corpus_tokens": len(stream),
        "tokens_seen": record.tokens,
        "steps": record.steps,
        "training_minutes": record.seconds / 60.0,
        "machine": machine(settings.device.type, settings.threads),
        "precision": _precision(settings),
        "seed": settings.seed,
        "training_losses": record.losses,
    }


def _precision(settings: Settings) -> str:
    return "bf16 autocast" if settings.bf16 else "fp32"


def _shape(model: ModernBertForMaskedLM | Qwen3ForCausalLM) -> str:
    config = model.config
    return f"{config.num_hidden_layers} layers of width {config.hidden_size}"
