"""PrefixCache: which beginnings of prompts a simulated replica still knows.

The server's cache works block by block. Here a conversation, and instructions that several share,
are known up to some token or not at all, which takes one entry each instead of one for each block.
"""

from collections import OrderedDict

from loadtests.simulate.request import Request


class PrefixCache:
    """Instructions and conversations, up to a number of tokens; evicts the least recently used.

    Args:
        block_tokens: only whole blocks are found again.
        max_tokens: most tokens kept; 0 for no cache.
    """

    def __init__(self, block_tokens: int, max_tokens: int) -> None:
        self.num_tokens = 0
        """Tokens kept."""
        self._block_tokens = block_tokens
        self._max_tokens = max_tokens
        # Entry -> (how far it is known, how much of that is its own), oldest use first.
        self._known: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()

    def match(self, request: Request) -> int:
        """The tokens of a prompt that need not be read; two at least remain. Counts as a use."""
        known = 0
        for key in reversed(_keys(request)):
            if key in self._known:
                self._known.move_to_end(key)
                known = max(known, self._known[key][0])
        return min(known, self._whole(max(request.num_prompt - 2, 0)))

    def put(self, request: Request) -> None:
        """Keeps a prompt that has been read."""
        shared = min(self._whole(request.num_instructions), self._whole(request.num_prompt))
        instructions, conversation = _keys(request)
        # The instructions last: what others build on is evicted after it.
        self._keep(conversation, self._whole(request.num_prompt), shared)
        self._keep(instructions, shared, 0)
        while self.num_tokens > self._max_tokens:
            _, (_, own) = self._known.popitem(last=False)
            self.num_tokens -= own

    def _keep(self, key: tuple[str, int], known: int, shared: int) -> None:
        if known <= shared:
            return
        _, before = self._known.pop(key, (0, 0))
        self._known[key] = known, known - shared
        self.num_tokens += known - shared - before

    def _whole(self, num_tokens: int) -> int:
        return num_tokens // self._block_tokens * self._block_tokens


def _keys(request: Request) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("instructions", request.instructions), ("conversation", request.conversation)
