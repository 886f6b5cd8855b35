"""Synthetic tasks of any length: generated, and easy enough that a small model trained from scratch learns them.

    copy        copy:dkqa=dkqa
    reverse     reverse:dkqa=aqkd
    sort        sort:dkqa=adkq
    induction   dkqadkqa                 a random string, then the same again; scored from its second letter on
    passkey     sentences, one with the key, then the question for it; the depth is where the key stands
    recall      recall:ab=3 xk=7 ...?xk=7                the value of one of many names
    addition    addition:52+31=83        25 + 13 = 38 with the least digit first throughout
    parity      parity:0110=0100         how many ones so far, odd or even

An example is a prompt and the one right answer. `length` is the number of characters of both together, reached as
nearly as the task's form allows and never exceeded; with the tokenizer "bytes" a character is a token. As a source of
training data "task:copy" has examples up to 128 characters, "task:copy:512" up to 512, "task:all" those of every task.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, cycle, islice
from operator import xor
from string import ascii_lowercase

from lengthwise.errors import check_int

LONGEST = 128
"""The longest example of a source that does not say."""
CHARACTERS = {"train": 4_000_000, "held-out": 200_000}
"""About how many characters a source has."""
FILLER = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
ALL_TASKS = "all"
"""The name of the source that has every task."""
DIGITS = 5
"""How long a passkey is."""


@dataclass(frozen=True)
class Example:
    """A prompt and the one right answer; `depth` is where in the prompt the answer stands, from 0 to 1, if it does."""

    prompt: str
    answer: str
    depth: float | None = None


@dataclass(frozen=True)
class Task:
    """How one example is made, and the shortest length at which there is one."""

    make: Callable[[random.Random, int, float | None], Example]
    least: int
    has_depth: bool = False


def _copy(rng: random.Random, length: int, depth: float | None) -> Example:
    word = _letters(rng, (length - len("copy:=")) // 2)
    return Example(f"copy:{word}=", word)


def _reverse(rng: random.Random, length: int, depth: float | None) -> Example:
    word = _letters(rng, (length - len("reverse:=")) // 2)
    return Example(f"reverse:{word}=", word[::-1])


def _sort(rng: random.Random, length: int, depth: float | None) -> Example:
    word = _letters(rng, (length - len("sort:=")) // 2)
    return Example(f"sort:{word}=", "".join(sorted(word)))


def _induction(rng: random.Random, length: int, depth: float | None) -> Example:
    word = _letters(rng, length // 2)
    return Example(word + word[0], word[1:])


def _passkey(rng: random.Random, length: int, depth: float | None) -> Example:
    depth = rng.random() if depth is None else depth
    key = "".join(rng.choices("0123456789", k=DIGITS))
    needle, question = f"The key is {key}. ", "What is the key? The key is "
    room = length - len(needle) - len(question) - DIGITS
    sentences: list[str] = []
    while room >= 0:
        sentences.append(rng.choice(FILLER))
        room -= len(sentences[-1])
    # The last sentence did not fit.
    del sentences[-1]
    place = round(depth * len(sentences))
    return Example("".join([*sentences[:place], needle, *sentences[place:], question]), key, depth)


def _recall(rng: random.Random, length: int, depth: float | None) -> Example:
    depth = rng.random() if depth is None else depth
    # Names are as long as there must be different ones to fill the length.
    letters = next(n for n in count(2) if _pairs(length, n) <= len(ascii_lowercase) ** n)
    pairs = _pairs(length, letters)
    names = [_spelled(number, letters) for number in rng.sample(range(len(ascii_lowercase) ** letters), pairs)]
    values = rng.choices("0123456789", k=pairs)
    place = round(depth * (pairs - 1))
    listed = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    return Example(f"recall:{listed}?{names[place]}=", values[place], depth)


def _pairs(length: int, letters: int) -> int:
    """How many pairs of a name and a digit there is room for."""
    return (length - len("recall:?=3") - letters) // (letters + len("=3 "))


def _spelled(number: int, letters: int) -> str:
    base = len(ascii_lowercase)
    return "".join(ascii_lowercase[number // base**place % base] for place in reversed(range(letters)))


def _addition(rng: random.Random, length: int, depth: float | None) -> Example:
    digits = (length - len("addition:+=") - 1) // 3
    first, second = ("".join(rng.choices("0123456789", k=digits)) for _ in range(2))
    carry, total = 0, ""
    # Digit by digit: Python turns no text of more than 4,300 digits into a number.
    for one, other in zip(first, second, strict=True):
        carry, digit = divmod(int(one) + int(other) + carry, 10)
        total += str(digit)
    return Example(f"addition:{first}+{second}=", total + "1" * carry)


def _parity(rng: random.Random, length: int, depth: float | None) -> Example:
    bits = rng.choices((0, 1), k=(length - len("parity:=")) // 2)
    odd = accumulate(bits, xor)
    return Example(f"parity:{''.join(map(str, bits))}=", "".join(map(str, odd)))


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(ascii_lowercase, k=count))


TASKS = {
    "copy": Task(_copy, least=len("copy:a=a")),
    "reverse": Task(_reverse, least=len("reverse:a=a")),
    "sort": Task(_sort, least=len("sort:a=a")),
    "induction": Task(_induction, least=4),
    "passkey": Task(_passkey, least=len("The key is 12345. What is the key? The key is 12345"), has_depth=True),
    "recall": Task(_recall, least=len("recall:ab=3 ?ab=3"), has_depth=True),
    "addition": Task(_addition, least=len("addition:1+2=31")),
    "parity": Task(_parity, least=len("parity:0=0")),
}


def find_task(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; there are {', '.join(map(repr, TASKS))}. Take one of them.")
    return TASKS[name]


def examples(name: str, *, length: int, count: int, seed: int = 0, depth: float | None = None) -> list[Example]:
    """`count` examples of at most `length` characters, the same for the same seed.

    >>> examples("copy", length=14, count=1)
    [Example(prompt='copy:njov=', answer='njov', depth=None)]
    """
    task = find_task(name)
    check_int("count", count, "It counts examples.")
    check_int(f"the length of {name!r}", length, "It has no shorter example.", least=task.least)
    if depth is not None and not (task.has_depth and 0 <= depth <= 1):
        depths = [other for other, its in TASKS.items() if its.has_depth]
        raise ValueError(
            f"depth must be from 0 to 1, and of a task that has one, {' or '.join(map(repr, depths))}, "
            f"got {depth} of {name!r}"
        )
    rng = random.Random(f"{name} {length} {seed} {depth}")
    return [task.make(rng, length, depth) for _ in range(count)]


class TaskSource:
    """A task, or all of them in turn, as a source of documents: examples of every length up to the longest."""

    def __init__(self, spec: str) -> None:
        """From "copy", "copy:512" or "all:512"."""
        self.name, _, longest = spec.partition(":")
        self.tasks = list(TASKS.values()) if self.name == ALL_TASKS else [find_task(self.name)]
        if longest and not longest.isdecimal():
            raise ValueError(f"a task must be NAME or NAME:LONGEST, such as 'copy:512', got {spec!r}")
        self.longest = int(longest or LONGEST)
        least = max(task.least for task in self.tasks)
        check_int(f"the length of {self.name!r}", self.longest, "It has no shorter example.", least=least)

    def documents(self, split: str) -> Iterator[str]:
        """Prompt and answer of one example after the other."""
        for part in ("train", "held-out") if split == "all" else (split,):
            rng, left = random.Random(f"{self.name} {self.longest} {part}"), CHARACTERS[part]
            for task in cycle(self.tasks):
                example = task.make(rng, rng.randint(task.least, self.longest), None)
                yield example.prompt + example.answer
                left -= len(example.prompt) + len(example.answer)
                if left <= 0:
                    break

    def fingerprint(self) -> str:
        """The name, the longest length, and a sample of what is made today."""
        sample = "".join(islice(self.documents("train"), len(self.tasks)))
        return hashlib.sha256(f"{self.name} {self.longest} {CHARACTERS} {sample}".encode()).hexdigest()
