"""Credit: when a draft model that did not pay is asked again."""

_SHARE = 0.005  # of the time of passes
_MOST = 100.0  # steps of the draft model


class Credit:
    """Seconds that may be spent on draft tokens which probably do not pay.

    Nothing else tells whether they have come to. Where they did not, the draft model sleeps until
    there is enough, or until fewer sequences run, as a pass of fewer has more to spare.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._needed = 0.0
        self._num_sequences = 0

    def earn(self, seconds: float, seconds_per_step: float) -> None:
        """Takes in the time of passes, and that of a step of the draft model."""
        self._seconds = min(self._seconds + _SHARE * seconds, _MOST * seconds_per_step)

    def wakes(self, num_sequences: int) -> bool:
        """Whether the draft model is to be considered beside so many sequences."""
        return self._seconds >= self._needed or num_sequences < self._num_sequences

    def stay_awake(self) -> None:
        """Takes in that it paid, or that there was nothing to ask it."""
        self._needed = 0.0

    def sleep(self, num_sequences: int, cost: float) -> bool:
        """Takes in that it did not pay for any of so many sequences.

        Returns:
            Whether it is asked all the same, which takes ``cost`` seconds.
        """
        self._num_sequences, self._needed = num_sequences, cost
        if cost > self._seconds:
            return False
        self._seconds -= cost
        return True
