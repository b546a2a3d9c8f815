"""Prompts to write on from."""

PROMPTS = (
    "Once upon a time there was a little girl who lived with her grandmother",
    "The old man opened the door and",
    "In the middle of the night the ship struck",
    '"Where have you been?" asked the mother.',
    "The king had three sons, and the youngest of them",
    "A river is",
    "The train left the station at nine o'clock, and nobody",
    "He took the letter out of his pocket and read it again:",
    "There are many kinds of birds in the forest. Some of them",
    "When the war was over, the soldiers",
    "She had never seen the sea before, so",
    "The house at the end of the street had been empty for years.",
    '"I do not believe a word of it," said the captain, "and',
    "It was the coldest winter that anyone in the village could remember",
    "The doctor looked at the boy and shook his head.",
    "To make bread you need flour, water,",
    "The wolf came nearer and nearer, until",
    "Of all the teachers at the school, Miss Brown was",
    "They walked for three days through the mountains without",
    "The first thing that he noticed was",
)
