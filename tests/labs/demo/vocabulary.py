"""Word lists of the demo tasks: every word is one token of the demo tokenizer."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN = _words("Ada Cleo Eve Ida Kay Mia Ola Pam Sue Una Viv Zoe")
MEN = _words("Ben Dan Finn Gus Hal Jon Leo Ned Ray Tom Vic Wes")
PEOPLE = (*WOMEN, *MEN)

MONTHS = _words("January February March April May June July August September October November December")
SEASONS = _words("winter spring summer autumn")
"""Season ``s`` is the months ``3 s .. 3 s + 2``: the demo calendar doesn't wrap around the year's end."""
NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty twenty-one twenty-two twenty-three twenty-four twenty-five twenty-six twenty-seven "
    "twenty-eight twenty-nine thirty"
)
KIN = _words("father mother son daughter brother sister husband wife")
FURTHER_KIN = _words(
    "grandfather grandmother grandson granddaughter uncle aunt nephew niece father-in-law mother-in-law son-in-law "
    "daughter-in-law brother-in-law sister-in-law"
)

FIRST_NAMES = _words("Marn Tolo Vessa Kirin Orla Bram Sefa Dulin Pereth Yana Hesk Calo Ruvi Nadir Elsin Gorm")
FAMILY_NAMES = _words("Arkley Bowden Crane Dunmore Ellery Foss Garrow Hartwell Ives Jarrow Kestrel Lomax")
MATERIALS = _words("copper iron oak glass silver leather clay stone bone brass tin bronze pewter marble steel cedar")
OBJECTS = _words("lantern hammer chair bowl goblet drum flute mask mirror basket bell lock ladder clock kite spoon")
COLOURS = _words("red blue green yellow black white grey brown")
CLOTHS = _words("wool linen silk cotton felt velvet denim hemp")
GARMENTS = _words("coat scarf hat gloves boots cape shirt belt")
STAY_VERBS = _words("stays eats travels lodges")

FUNCTION_WORDS = _words(
    "Yes No Maybe In came Came Which month is months after before in from How many "
    "and more than Bids Coins Is of above below The Who to with What does carry wear Question Answer When"
)
PUNCTUATION = (".", "?", ":", "\n")


def all_words() -> tuple[str, ...]:
    """Every word and mark the demo prompts and answers are made of, without repeats, in a fixed order."""
    lists = (
        PUNCTUATION, FUNCTION_WORDS, PEOPLE, MONTHS, SEASONS, NUMBERS, KIN, FURTHER_KIN, FIRST_NAMES,
        FAMILY_NAMES, MATERIALS, OBJECTS, COLOURS, CLOTHS, GARMENTS, STAY_VERBS,
    )  # fmt: skip
    return tuple(dict.fromkeys(word for words in lists for word in words))
