"""Words and numbers as people write them: in any script, with signs, groups of thousands, units, and in TeX."""

from __future__ import annotations

import re
import string
import unicodedata
from fractions import Fraction
from functools import lru_cache

Words = tuple[str, ...]

_THIN = "\u2009"
_MINUS = "-\u2010\u2011\u2013\u2212\ufe63\uff0d"
_ALIKE = dict.fromkeys(map(ord, _MINUS), "-") | dict.fromkeys(map(ord, "'\u2018\u2019\u02bc\uff07"), "'")
_ALIKE |= {0x066A: "%", 0x066B: ".", 0x066C: ","}  # the Arabic signs
# Forms of ASCII characters that are as wide as others of East Asian scripts, or small.
_WIDE = re.compile("[\uff01-\uff5e\ufe50-\ufe6b]")
# Marks of punctuation that belong to what they follow, such as C# and 5 %.
_OF_NAMES = "#%&*@/\\\u2030\u2031\u2032\u2033"
# What stands for a letter of a script that puts no space between words.
_UNSPACED = "\0"
_UNSPACED_SCRIPTS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003ffff]"
)


class _Alike(dict[int, str | None]):
    """What is written in several ways, in one of them: signs, digits, blanks. What can't be seen is left out."""

    def __missing__(self, code: int) -> str | None:
        letter = chr(code)
        category = unicodedata.category(letter)
        made: str | None = letter
        if category == "Cf":
            made = None
        elif category == "Nd":
            made = str(unicodedata.decimal(letter))
        elif category == "Zs" and letter != " ":
            made = _THIN
        elif _WIDE.match(letter):
            made = unicodedata.normalize("NFKC", letter)
        return self.setdefault(code, made)


class _Kinds(dict[int, str]):
    """The kind of every character: `a` for letters and marks, but `e` for itself; digits and ASCII signs stay."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        category, made = unicodedata.category(letter), "?"
        if letter.isdecimal() or letter in (*"eE", _THIN):
            made = letter
        elif _UNSPACED_SCRIPTS.match(letter):
            made = _UNSPACED
        elif category[0] in "LMN" or letter == "_":
            made = "a"
        elif category == "Sc":
            made = "$"
        elif letter in string.punctuation or letter.isspace():
            made = letter
        return self.setdefault(code, made)


class _Closing(dict[int, bool]):
    """Whether a character may close an answer without being a part of it: blanks, stops, quotes and brackets."""

    def __missing__(self, code: int) -> bool:
        letter = chr(code)
        category = unicodedata.category(letter)
        made = letter.isspace() or category in ("Pe", "Pf", "Pi") or (category == "Po" and letter not in _OF_NAMES)
        return self.setdefault(code, made)


_ALIKE_TABLE, _KINDS, _CLOSING = _Alike(_ALIKE), _Kinds(), _Closing()


def alike(text: str) -> str:
    """Return the text with one form of every sign, digit and blank; that of a beginning is a beginning of it."""
    return text.translate(_ALIKE_TABLE)


def kinds(text: str) -> str:
    """Return the kind of every character of a text that is `alike`."""
    return text.translate(_KINDS)


def plain(text: str) -> str:
    """Return the text without differences in case, white space and composition (NFD); beginnings as of `alike`.

    A mark at the end, to which others may come, isn't part of a beginning: see `beginning`.
    """
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", alike(text)).casefold())
    return " ".join(folded.split())


def beginning(text: str) -> str:
    """Return what `plain` of all texts that begin with this one begins with."""
    stable = unicodedata.normalize("NFD", alike(text))
    while stable and unicodedata.combining(stable[-1]):
        stable = stable[:-1]
    return plain(stable)


def without_closing(text: str) -> str:
    """Return a `plain` text without the punctuation that closes it."""
    end = len(text)
    while end and _CLOSING[ord(text[end - 1])]:
        end -= 1
    return text[:end]


# Numbers, in the kinds of their characters: 3/4; 1,234.5 and 1,00,000; 1'234.5 and 1 234,5; 1.234.567 and 1.234,5; 1,5
# but not 1,5,7; 1.5 and .5, and these with an exponent.
_FRACTION = r"(?<![/\d.,])\d+/0*[1-9]\d*(?![/\d])"
_POINTS = r"[1-9]\d{0,2}(?:(?:\.\d{3}){2,}(?!\.?\d)(?:,\d+)?|(?:\.\d{3})+,\d+)"
_DIGITS = (
    rf"[1-9]\d{{0,2}}(?:,\d{{2,3}})*,\d{{3}}(?!\d)(?:\.\d+)?|[1-9]\d{{0,2}}(?:['{_THIN}]\d{{3}})+(?!\d)(?:[.,]\d+)?"
    rf"|{_POINTS}|(?<!\d,)(?:0,\d+|\d+,\d{{1,2}})(?!,?\d)|\d+(?:\.\d+)?|(?<![\w.])\.\d+"
)
_SIGN = r"(?<![\w)\-])-"
_NUMBER = re.compile(rf"(?:{_SIGN}\$?|\$?)(?>{_FRACTION}|(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}}(?!\w))?)")
# What may still become a part of a number.
_GOES_ON = re.compile(rf"[\d.,'{_THIN}/eE+\-{{}}\\]*")

# Words: U.S. as one, 1.2.3 and 1/2/2000, 5kg, a number, C++ and .NET, letters that stand alone, and the percent sign.
_WORD = re.compile(
    rf"(?P<initials>(?<!\w)(?:(?:[aeE]\.)+[aeE](?!\w)|(?:[aeE]\.){{2,}}))"
    rf"|(?!{_POINTS})\d+(?:\.\d+){{2,}}|\d+(?:/\d+){{2,}}|(?:{_SIGN})?\d+[aeE]\w*"
    rf"|(?P<number>(?:{_SIGN}\$?)?(?>{_FRACTION}|{_DIGITS}))"
    rf"|(?:(?<![\w.)])\.(?=[aeE]))?\w+(?:\.\d+)*(?:\+\++|#+|\+(?!\w))?|{_UNSPACED}|%"
)
_PERCENT = frozenset(("percent", "prozent", "pourcent"))


@lru_cache(maxsize=65536)
def words(text: str) -> Words:
    """Return the words of a text, ignoring case and composition, without punctuation; numbers without groups.

    No word spans white space of ASCII, so those before it are complete in a beginning of a text.
    """
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", alike(text)).casefold())
    found = []
    for match in _WORD.finditer(kinds(text)):
        word = text[slice(*match.span())]
        if match["number"] is not None:
            word = _decimal(word)
        elif match["initials"] is not None:
            word = word.replace(".", "")
        found.append("%" if word in _PERCENT else word)
    return tuple(found)


def numbers(text: str) -> list[Fraction]:
    """Return the numbers of a text in their order."""
    text = alike(text)
    return [_value(text[slice(*match.span())]) for match in _NUMBER.finditer(kinds(text))]


def first_number_settled(text: str) -> bool:
    """Return whether the first number of a text, in TeX or not, stays the same however the text goes on."""
    text = alike(text)
    match = _NUMBER.search(kinds(text))
    on = match and _GOES_ON.match(text, match.end())
    return on is not None and on.end() < len(text) and "\\" not in text[: on.end()]


def _value(number: str) -> Fraction:
    whole, _, below = number.partition("/")
    digits, exponent, power = whole.lower().partition("e")
    return Fraction(_decimal(digits) + exponent + power) / (int(below) if below else 1)


def _decimal(number: str) -> str:
    """Return a number with a decimal point and without currency, groups, and zeros that are all of its decimals."""
    number = re.sub(r"[^\d.,/\-]", "", number)
    whole, slash, below = number.partition("/")
    sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    point = max(digits.rfind("."), digits.rfind(","))
    mark = digits[point] if point >= 0 else ""
    groups = digits.count(mark) > 1 if mark else True
    if mark == "," and not groups and "." not in digits:
        # 1,234 is grouped; 0,234 and 1,5 aren't.
        groups = len(digits) - point == 4 and not digits.startswith("0") and point <= 3
    if groups:
        return f"{sign}{re.sub('[.,]', '', digits)}{slash}{below}"
    before, after = re.sub("[.,]", "", digits[:point]) or "0", digits[point + 1 :]
    decimals = f".{after}" if after.strip("0") else ""
    return f"{sign}{before}{decimals}{slash}{below}"


_TEX = (
    (re.compile(r"\\[dt]?frac\s*\{\s*([\d.,]+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!|(?<=[\d,])\\[,:;](?=\d)"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


def without_tex(text: str) -> str:
    """Return the text with fractions, groups of thousands and signs of TeX as in plain text."""
    for pattern, plainly in _TEX:
        text = pattern.sub(plainly, text)
    return text


def last_box(text: str) -> str:
    """Return what the last box of TeX holds, or an empty text."""
    return next(reversed(_BOXED.findall(text)), "")
