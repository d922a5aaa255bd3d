"""The words that tasks are made of, none of which contains another: common English ones, and made-up ones."""

import random
from collections.abc import Callable
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.haystack import encode

NOUNS = tuple(
    """
    anchor apple arrow autumn badge bakery balloon banana basket beacon blanket bottle bracket branch
    bridge bucket butter button cabin camera candle canyon carpet castle cherry church circle clock cloud
    coffee copper corner cotton cradle crystal curtain desert diamond doctor dragon drawer eagle engine
    falcon feather fiddle finger forest fountain garden guitar hammer harbor helmet honey island jacket
    kettle kitchen ladder lantern lemon letter lizard magnet marble market meadow mirror monkey mountain
    needle ocean orange orchid oven paper parrot pencil pepper piano pillow planet pocket prison puzzle
    rabbit ribbon river rocket saddle sailor school shadow shovel spider spoon statue summer teacher
    temple thunder ticket tiger tower trumpet tunnel turtle valley velvet village violin wagon walnut
    whistle window winter wizard yogurt zebra
    """.split()  # noqa: SIM905 - a list of 100 quoted words would be longer
)

ADJECTIVES = tuple(
    """
    ancient amber brave bright brisk broken bronze calm careful cheap clever cosmic crimson crisp curious
    daily dusty eager early elegant empty famous fierce foggy formal frozen gentle giant golden grand
    happy heavy hidden hollow honest humble icy jolly keen large lazy little local lonely lucky mellow
    mighty modern muddy noble odd olive pale patient plain polite proud purple quick quiet rapid rare
    rough royal rustic scarlet secret sharp shiny silent silver simple sleepy smooth solid steady stormy
    strange sturdy sweet swift tender tidy tiny vivid warm wealthy wild wise wooden young
    """.split()  # noqa: SIM905 - a list of 100 quoted words would be longer
)

COMMON = tuple(
    """
    again back call class data default error file function import key line local method module name node
    object option path print result return start string text time type value
    """.split()  # noqa: SIM905 - a list of 29 quoted words would be longer
)
"""Words of which most vocabularies have each as one token, so that none begins as another does."""


MADE_UP_KEYS = tuple(
    """
    tive hari nake vite vame rase pere tari vate fime pake nari lata nase nare hite bize buse tave hage pive
    tase dase vuse hile vise sule bave tuse mize vure bive rure bame fone fere lare nize pari ture fule bine
    bere vize nive nage nere dite lule fari bari dure nile pise sise fite mone fure huse hise nata mage hata
    suse tere vata vake lase pime vule dake mive pame bime
    """.split()  # noqa: SIM905 - a list of 74 quoted words would be longer
)

MADE_UP_VALUES = tuple(
    """
    hize mase bate nure vage rata vari dize luse fise hame tule rine mame tage lave nite fize sase sive tata
    tize lere dise pone mave sere pata fata hule hine hake bure hure mite pule bage nime dere bata sare bule
    vone rere pase vave sari hase mure tise sata mise dage dime mata fave rone tate dile vare lure fase rame
    hime sone pite mari nise pize rari lari bise nule nate
    """.split()  # noqa: SIM905 - a list of 74 quoted words would be longer
)
"""The vocabulary of the forms that are held out: neither generated rows nor the standard library have it."""


@lru_cache(maxsize=64)
def longest_word(tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...]) -> str:
    """Return the word that takes the most tokens after a space."""
    return max(words, key=lambda word: len(encode(tokenizer, f" {word}")))


@lru_cache(maxsize=64)
def longest_pair(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the word pair that takes the most tokens after a space; its two halves are tokenised apart."""
    noun = max(NOUNS, key=lambda word: len(encode(tokenizer, f"-{word}")))
    return f"{longest_word(tokenizer, ADJECTIVES)}-{noun}"


def word_pair(rng: random.Random) -> str:
    """Draw one of about 11,000 compound words such as `brave-lantern`."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def distinct(count: int, draw: Callable[[], str], taken: set[str]) -> list[str]:
    """Draw `count` strings that are neither among `taken` nor drawn twice, and add them to `taken`."""
    drawn: list[str] = []
    while len(drawn) < count:
        value = draw()
        if value not in taken:
            taken.add(value)
            drawn.append(value)
    return drawn


def number(rng: random.Random, digits: int) -> str:
    """Draw a number of exactly `digits` digits, as text: a shorter one could match by accident."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))
