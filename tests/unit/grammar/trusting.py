"""A checker for grammars that are known to be harmless."""


class Trusting:
    """Takes every grammar unseen; a child process for each compiler takes a second."""

    def check(self, grammar: str) -> None:
        """Accepts it."""

    def close(self) -> None:
        """Nothing is open."""
