"""PromptLookup: draft tokens from the text itself."""

from maskdial.causal.drafts.follower import Follower, Grams, find_place
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind


class PromptLookup:
    """Prompt-lookup decoding (Saxena 2023, "Prompt Lookup Decoding").

    If the last few tokens occur earlier in the text, the tokens that followed them there become
    draft tokens, which works well for copies, edits, quotes and summaries.
    """

    kind: DraftKind = "prompt"

    def reader(self, sequence: Sequence) -> "_Reader":
        """See `maskdial.causal.drafts.draft.Proposer`: any text may repeat itself."""
        return _Reader(sequence)


class _Reader:
    """Follows a text through its own earlier tokens."""

    __slots__ = ("_follower", "_grams", "_num_tokens")

    def __init__(self, sequence: Sequence) -> None:
        self._num_tokens = sequence.num_tokens - 1
        before = sequence.token_ids[: self._num_tokens]
        self._grams = Grams(before)
        self._follower = Follower(before, self._num_tokens)

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `maskdial.causal.drafts.draft.Reader`."""
        follower, start, text = self._follower, self._num_tokens, sequence.token_ids
        self._num_tokens = len(text)
        for end, token_id in enumerate(text[start:].tolist(), start + 1):
            follower.source = text[: end - 1]  # not the token itself
            goes_on = follower.push(token_id)
            if self._grams.add(token_id) and not goes_on:
                place = find_place(text[:end], text[:end])
                if place:
                    follower.go_to(place)
        follower.source = text
        following = follower.following(max_tokens)
        while following and len(following) < max_tokens:
            # What has begun to repeat itself goes on to do so.
            following += following[: max_tokens - len(following)]
        return following
