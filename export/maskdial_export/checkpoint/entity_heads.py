"""GLiNER's heads, as products of single words and labels.

A span of the words i to j has for a label c the score W2 relu(W1 [s_i, e_j] + b1) . p_c, where s, e
and p are functions of single words or labels. The first product is a sum of one of s_i and one of
e_j, and W2 may be applied to the label instead of to each span. So the graph gives columns for each
word and each label, and a score is relu(start_i + end_j) . query_c + bias_c.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Weights = Mapping[str, Tensor]

_SPANS = "span_rep_layer.span_rep_layer."


class WordHead(nn.Module):
    """Columns (start, end) of each word, of a model whose labels have an encoder of their own."""

    def __init__(self, stored: Weights) -> None:
        super().__init__()
        first = stored[f"{_SPANS}out_project.0.weight"]
        width = first.shape[1] // 2
        self.start_word = _two_layers(stored, f"{_SPANS}project_start")
        self.end_word = _two_layers(stored, f"{_SPANS}project_end")
        self.start = _linear(first[:, :width])
        self.end = _linear(first[:, width:], stored[f"{_SPANS}out_project.0.bias"])
        self.num_columns = 2 * first.shape[0]

    def forward(self, hidden: Tensor) -> Tensor:
        start = self.start(torch.relu(self.start_word(hidden)))
        end = self.end(torch.relu(self.end_word(hidden)))
        return torch.cat([start, end], dim=-1)


class LabelHead(nn.Module):
    """Columns (query, bias) of each label."""

    def __init__(self, stored: Weights) -> None:
        super().__init__()
        self.label = _two_layers(stored, "prompt_rep_layer")
        self.query = _linear(stored[f"{_SPANS}out_project.3.weight"].T)
        self.bias = _linear(stored[f"{_SPANS}out_project.3.bias"][None])
        self.num_columns = 1 + stored[f"{_SPANS}out_project.3.weight"].shape[1]

    def forward(self, hidden: Tensor) -> Tensor:
        label = self.label(hidden)
        return torch.cat([self.query(label), self.bias(label)], dim=-1)


class SpanHead(nn.Module):
    """Columns (start, end, query, bias) of each word or label, of markerV0."""

    def __init__(self, stored: Weights) -> None:
        super().__init__()
        self.of_word, self.of_label = WordHead(stored), LabelHead(stored)
        self.num_columns = self.of_word.num_columns + self.of_label.num_columns

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([self.of_word(hidden), self.of_label(hidden)], dim=-1)


class TokenHead(nn.Module):
    """Scores (start, end, inside) of pairs of a word and a label.

    By default each token is paired with the first one of its text; see `paired`.
    """

    num_columns = 3

    def __init__(self, stored: Weights) -> None:
        super().__init__()
        token, label, mix = (
            stored[f"scorer.{name}.weight"] for name in ("proj_token", "proj_label", "out_mlp.0")
        )
        token_bias, label_bias = stored["scorer.proj_token.bias"], stored["scorer.proj_label.bias"]
        width = token.shape[1]
        of_token, of_label, of_both = torch.split(mix, width, dim=1)
        bias = stored["scorer.out_mlp.0.bias"] + of_token @ token_bias[:width]
        self.word = _linear(of_token @ token[:width])
        self.label = _linear(of_label @ label[:width], bias + of_label @ label_bias[:width])
        self.word_factor = _linear(token[width:], token_bias[width:])
        self.label_factor = _linear(label[width:], label_bias[width:])
        self.both = _linear(of_both)
        self.score = _linear(stored["scorer.out_mlp.3.weight"], stored["scorer.out_mlp.3.bias"])
        self.pairs: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        word, label = self.word(hidden), self.label(hidden)
        factor, of_label = self.word_factor(hidden), self.label_factor(hidden)
        if self.pairs is None:
            label, of_label = label[:, :1], of_label[:, :1]
        else:
            words, labels = self.pairs[:, 0], self.pairs[:, 1]
            word, factor = (each.index_select(1, words) for each in (word, factor))
            label, of_label = (each.index_select(1, labels) for each in (label, of_label))
        scores: Tensor = self.score(torch.relu(word + label + self.both(factor * of_label)))
        return scores


class WordContext(nn.Module):
    """A bidirectional LSTM over the words of each text, if the model has one.

    Words are the rows after the token that separates them from labels, or all rows of a text
    without one. By default every token is a row; see `located`.
    """

    def __init__(self, stored: Weights, num_layers: int) -> None:
        super().__init__()
        self.separator = -1
        self.rows: Tensor | None = None
        self.num_layers = num_layers if "rnn.lstm.weight_ih_l0" in stored else 0
        if num_layers > 0:
            width = stored["rnn.lstm.weight_ih_l0"].shape[1]
            self.lstm = nn.LSTM(width, width // 2, num_layers, bidirectional=True, batch_first=True)
            self.lstm.load_state_dict(
                {n.removeprefix("rnn.lstm."): w for n, w in stored.items() if "rnn.lstm." in n}
            )

    def forward(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        if not self.num_layers:
            return hidden
        places = torch.arange(input_ids.shape[1])[None]
        found = (input_ids == self.separator).int()
        ends = torch.where(found.sum(dim=1) > 0, found.argmax(dim=1), -1)
        is_word = places > ends[:, None]
        if self.rows is None:
            texts = [
                torch.cat([text[~words], self.lstm(text[None, words])[0][0]])
                if bool(words.any())
                else text
                for text, words in zip(hidden, is_word, strict=True)
            ]
            return torch.stack(texts)
        return self._of_rows(hidden[0], is_word.flatten()[self.rows], input_ids)[None]

    def _of_rows(self, rows: Tensor, is_word: Tensor, input_ids: Tensor) -> Tensor:
        """The same of ``rows``, (num_rows, columns), in ascending order; within it, in float32."""
        hidden = rows.float()
        assert self.rows is not None, "of a graph that gathers them"
        batch, length = input_ids.shape
        text = self.rows // length
        member = (text[None] == torch.arange(batch)[:, None]) & is_word[None]  # (batch, num_rows)
        counts = member.sum(dim=1)
        before = counts.cumsum(0) - counts
        rank = is_word.long().cumsum(0) - 1 - before[text]
        spare = batch * length  # where other rows are put
        place = torch.where(is_word, text * length + rank, spare)
        padded = torch.zeros(spare + 1, hidden.shape[1]).index_copy(0, place, hidden)
        words = padded[:spare].view(batch, length, -1).transpose(0, 1)
        lengths = counts.clamp(min=1).int()
        for layer in range(self.num_layers):
            words = self._layer(words, lengths, layer)
        flat = words.transpose(0, 1).reshape(spare, -1)
        chosen = flat.index_select(0, torch.where(is_word, place, 0))
        return torch.where(is_word[:, None], chosen, hidden).to(rows.dtype)

    def _layer(self, words: Tensor, lengths: Tensor, layer: int) -> Tensor:
        """One layer over (length, batch, columns), by ONNX's operator."""
        width = self.lstm.hidden_size
        weights = []
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            both = [getattr(self.lstm, f"{name}_l{layer}{end}") for end in ("", "_reverse")]
            # torch has the gates in the order i, f, c, o, ONNX as i, o, f, c
            gates = [each.float().view(4, width, *each.shape[1:])[[0, 3, 1, 2]] for each in both]
            weights.append(torch.stack([each.flatten(0, 1) for each in gates]))
        output = torch.onnx.ops.symbolic(
            "LSTM",
            [words, weights[0], weights[1], torch.cat(weights[2:], dim=1), lengths],
            {"hidden_size": width, "direction": "bidirectional"},
            dtype=torch.float32,
            shape=(words.shape[0], 2, words.shape[1], width),
        )
        return output.transpose(1, 2).flatten(2)


@contextmanager
def located(model: nn.Module, rows: Tensor, pairs: Tensor | None) -> Iterator[None]:
    """Lets a GLiNER model know which rows its head gets, and which of them to pair, inside the
    block; other models do not care.
    """
    words, head = getattr(model, "words", None), getattr(model, "head", None)
    if not isinstance(words, WordContext):
        yield
        return
    words.rows = rows
    if isinstance(head, TokenHead):
        head.pairs = pairs
    try:
        yield
    finally:
        words.rows = None
        if isinstance(head, TokenHead):
            head.pairs = None


def _two_layers(stored: Weights, name: str) -> nn.Sequential:
    """A product, ReLU and another one; dropout stands between them in a checkpoint."""
    first, last = (
        _linear(stored[f"{name}.{place}.weight"], stored[f"{name}.{place}.bias"])
        for place in (0, 3)
    )
    return nn.Sequential(first, nn.ReLU(), last)


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
