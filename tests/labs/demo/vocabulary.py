"""Word lists of the demo world: every word is one token of the demo tokenizer."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


AGENTS = _words("Ada Ben Cleo Dan Eve Finn Gus Hal Ida Jon Kay Leo Mia Ned Ola Pam Quin Ray Sue Tom Una Vic Wes Zoe")
FIRST_NAMES = _words(
    "Marn Tolo Vessa Kirin Orla Bram Sefa Dulin Pereth Yana Hesk Calo Ruvi Nadir Elsin Gorm "
    "Talin Odessa Bren Mirel Jory Sylva Corin Wyra Ansel Belka Doran Emrys Fenna Galen Hollis Isolde "
    "Jarek Keld Linnea Osric Petra Rasmus Tamsin Ulric"
)
FAMILY_NAMES = _words(
    "Arkley Bowden Crane Dunmore Ellery Foss Garrow Hartwell Ives Jarrow Kestrel Lomax "
    "Mercer Norwood Oakley Prewitt Quarles Redfern Selwyn Thorne Underhill Vance Wexford Yarrow "
    "Ashdown Blackwell Calder Drummond Everett Fairfax Granger Ingram Kendrick Langley Marlow Osborne"
)
TOWNS = _words("Dorf Kelm Norvale Brisk Tarn Holt Wick Ashby")

MATERIALS = _words(
    "copper iron oak glass silver leather clay stone bone brass tin bronze pewter marble "
    "steel cedar maple wicker slate granite birch wax rubber paper"
)
OBJECTS = _words(
    "lantern hammer chair bowl goblet drum flute mask mirror basket bell lock ladder clock kite spoon "
    "comb whistle saddle barrel quilt candle vase compass anchor needle thimble bucket pillow broom"
)
COLOURS = _words("red blue green yellow black white grey brown purple orange")
CLOTHS = _words("wool linen silk cotton felt velvet denim hemp")
GARMENTS = _words("coat scarf hat gloves boots cape shirt belt")
LEVELS = _words("one two three four five six seven eight")

FESTIVAL_ADJECTIVES = _words(
    "Amber Bright Crimson Dusk Elder Frost Golden Hollow Ivory Jade Lunar Misty Noble Opal "
    "Pearl Quiet Royal Silent Twilight Wild"
)
FESTIVAL_NOUNS = _words(
    "Feast Fair Vigil Dance Parade Market Supper Race Regatta Revel "
    "Gala Ball Banquet Carnival Bazaar Pageant Jubilee Tournament Games Procession"
)
MONTHS = _words("January February March April May June July August September October November December")
SEASONS = _words("winter spring summer autumn")
"""Season ``s`` is the months ``3 s .. 3 s + 2``: the demo calendar doesn't wrap around the year's end."""

SENSE_WORDS = _words(
    "bank bat bark bolt bow box bridge club date draft drill fan file jam key match mine nail organ palm pitch "
    "plant pool port press rock scale seal star tie wave jar ring chest deck lime pen ruler trunk yard band bass "
    "bay beam bill blade block board bond bug cabinet calf cap cast cell chip cone court crown current cycle "
    "degree dial dish drop field foil fork frame gear hook joint"
)
TOPIC_CUES = (
    _words("river lake canoe heron reeds otter"),
    _words("coin loan wallet teller cheque vault"),
    _words("referee goal stadium athlete tackle umpire"),
    _words("cow hen goat sheep piglet donkey"),
    _words("violin piano singer chorus opera guitar"),
    _words("oven kettle recipe butter pepper stew"),
    _words("screw wrench plywood chisel pliers rivet"),
    _words("soldier cannon fortress helmet sergeant trench"),
    _words("meadow orchard fern moss petal cactus"),
    _words("planet comet telescope orbit galaxy meteor"),
    _words("lawyer judge verdict jury prison witness"),
    _words("surgeon nurse fever bandage clinic pulse"),
)
SENSE_NAMES = ("first", "second")

TRANSFER_VERBS = _words("bought sold found lost")
QUALITIES = ("large", "dear", "foreign")
STAY_VERBS = _words("stays eats travels lodges")
FUNCTION_WORDS = _words(
    "A B C Yes No the a and in at by near with has saw came host thing of does carry wear before after same "
    "larger dearer Has What Same meaning Entailed Question Answer Contradiction Entailment Neutral "
    "origin size price carries wears month sense"
)
PUNCTUATION = (".", "?", ":", "\n")


def all_words() -> tuple[str, ...]:
    """Every word and mark the demo prompts and answers are made of, without repeats, in a fixed order."""
    cues = tuple(cue for topic in TOPIC_CUES for cue in topic)
    lists = (
        PUNCTUATION, FUNCTION_WORDS, AGENTS, FIRST_NAMES, FAMILY_NAMES, TOWNS, MATERIALS, OBJECTS, COLOURS, CLOTHS,
        GARMENTS, LEVELS, FESTIVAL_ADJECTIVES, FESTIVAL_NOUNS, MONTHS, SEASONS, SENSE_WORDS, cues, SENSE_NAMES,
        QUALITIES, TRANSFER_VERBS, STAY_VERBS,
    )  # fmt: skip
    return tuple(dict.fromkeys(word for words in lists for word in words))
