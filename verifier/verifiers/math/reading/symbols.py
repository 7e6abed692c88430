# ruff: noqa: RUF001 - characters that look like others are what these tables map
"""Owns the tables of characters and LaTeX commands, and how each is written in a clean text.

Must not have a command that changes a value.
"""

from __future__ import annotations

FRACTIONS = {
    "½": "1/2",
    "⅓": "1/3",
    "⅔": "2/3",
    "¼": "1/4",
    "¾": "3/4",
    "⅕": "1/5",
    "⅖": "2/5",
    "⅗": "3/5",
    "⅘": "4/5",
    "⅙": "1/6",
    "⅚": "5/6",
    "⅛": "1/8",
    "⅜": "3/8",
    "⅝": "5/8",
    "⅞": "7/8",
}
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))

SYMBOLS = {
    **dict.fromkeys("−‐‑‒–—﹣－", "-"),
    **dict.fromkeys("\xa0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\r\n", " "),
    **dict.fromkeys("‘’′`", "'"),
    **dict.fromkeys("“”″«»", '"'),
    "×": r"\times ",
    "⋅": r"\cdot ",
    "·": r"\cdot ",
    "∙": r"\cdot ",
    "÷": r"\div ",
    "∕": "/",
    "⁄": "/",
    "√": r"\sqrt ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∈": r"\in ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∅": r"\emptyset ",
    "∠": r"\angle ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "º": "°",
    "˚": "°",
    "…": "...",
    "→": r"\to ",
    "⇒": r"\implies ",
    **dict.fromkeys("✅✓✔☑✨🎉👍💯🎯🏆😊🙂", " "),
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "λ": r"\lambda ",
    "φ": r"\phi ",
    "∣": "|",
}
TRANSLATION = {
    **dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127, 173, 1564, 65279)),
    **dict.fromkeys((*range(8203, 8208), *range(8234, 8239), *range(8288, 8304))),
    **{ord(sign): written for sign, written in SYMBOLS.items()},
}
"""Controls, zero-width characters and direction marks are removed."""

COMMANDS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(
        (
            *("textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "emph", "mbox", "hbox", "mathrm"),
            *("mathbf", "mathit", "mathsf", "mathtt", "mathbb", "mathcal", "operatorname", "boldsymbol", "bm"),
            *("boxed", "fbox", "underline", "texttt", "textsc", "rm", "bf", "ensuremath"),
        ),
        r"\text",
    ),
    **dict.fromkeys(("left", "right", "displaystyle", "textstyle", "limits", "big", "Big", "bigg", "Bigg"), ""),
    **dict.fromkeys(("bigl", "bigr", "Bigl", "Bigr", "mleft", "mright", "nolimits", "scriptstyle"), ""),
    **dict.fromkeys(("quad", "qquad", "enspace", "thinspace", "space", "hspace", "nobreak"), " "),
    **dict.fromkeys(("le", "leq", "leqslant"), r"\le "),
    **dict.fromkeys(("ge", "geq", "geqslant"), r"\ge "),
    **dict.fromkeys(("ne", "neq"), r"\ne "),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("implies", "Rightarrow", "Longrightarrow", "longrightarrow", "therefore"), r"\implies "),
    **dict.fromkeys(("emptyset", "varnothing"), r"\emptyset "),
    "lt": "<",
    "gt": ">",
    "lbrace": r"\{",
    "rbrace": r"\}",
    "lbrack": "[",
    "rbrack": "]",
    "degree": "°",
    "percent": "%",
    "colon": ":",
    "sim": r"\approx ",
    "simeq": r"\approx ",
    "cong": r"\approx ",
    "ldots": "...",
    "dots": "...",
    "cdots": "...",
    "euro": "€",
    "pounds": "£",
}
"""By LaTeX command, without the backslash: what is written for it."""
