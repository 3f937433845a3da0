"""Names that other programs take for something else, and what they would take them for."""

import re
import unicodedata
from urllib.parse import quote, unquote_plus

from hypothesis import strategies as st

# Blanks, what URLs and shells give a meaning, patterns, quotes, accents, and an emoji; two letters that patterns match.
CHARACTERS = " #%+&;=[]{}*?'\"éü🎉,!()$-.ab2"
ALL = "a [ab]{a,b}*?#%20+&;='\"é🎉"  # each of them in one name
NAMES = st.one_of(
    st.text(CHARACTERS, min_size=1, max_size=12),
    st.lists(st.sampled_from(["[ab]", "[!a]", "{a,b}", "*", "**", "?", "%41", "#1", "a", "b", " "]), min_size=1).map(
        "".join
    ),
).filter(lambda name: name.strip(".") and len(name) <= 24)


def decoys(name: str) -> list[str]:
    """Names for which a pattern, a URL or a careless program takes `name`."""
    brackets = re.sub(r"\[!?([^\]])[^\]]*\]", r"\1", name)
    found = {
        brackets,
        re.sub(r"[*?]", "a", brackets),
        re.sub(r"[*?]", "", brackets),
        re.sub(r"[*?]", "a", name),
        re.sub(r"\{([^,}]*)[^}]*\}", r"\1", name),
        *(name[: name.index(character)] for character in "#?;&%[{*+=, " if character in name),
        unquote_plus(name),
        quote(name),
        name.strip(),
        unicodedata.normalize("NFD", name),
        name.replace("\\", ""),
        name + "a",
        name[:-1],
        "a",
    }
    return sorted(other for other in found - {name} if other.strip(".") and not set(other) & set("/\0"))
