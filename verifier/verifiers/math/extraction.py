"""Owns where a response's answer is: its last box, else its last answer line, else, on request, its last number.

Must not read the answer as a value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from verifier.verifiers.math.reading.hedges import retraction
from verifier.verifiers.math.reading.notation import closing_brace, lacks_operand
from verifier.verifiers.math.reading.numerals import PLAIN
from verifier.verifiers.math.surroundings import is_no_mark, whole_box, withdrawal

SEARCHED = 20_000
"""Characters at the end of a response that are searched. A box before them is not seen."""

LONGEST = 2_000  # characters of an answer
BOXES = 8  # different boxes that are compared
SHORTEST_MARK = len("A: 5")
BEFORE = 400  # characters before a mark that may deny it

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
SURROGATE = re.compile("[\ud800-\udfff]")
MARK = re.compile(
    r"[aAcCrR#](?:(?<=#)###(?!#)(?:(?<=^####)|(?<=[ \t]####)(?=[ \t]*[^\s#][^\n#]{0,60}$))[ \t]*"
    r"|(?i:(?:(?<=\ba)ns(?:wers?)?|(?:(?<=\bc)orrect|(?<=\br)ight)[ \t](?:option|choice|letter))\b[*_\"”]{0,3}"
    r"(?:[ \t]+(?:(?:to|for)[ \t][^.:\n]{0,80}?|(?:that[ \t]+)?(?:we|you|I)[ \t]+"
    r"(?:want|need|seek|get|obtain|(?:are|were|am)[ \t]+(?:after|(?:looking|searching|asked)[ \t]+for))))?"
    r"(?:[ \t]*[,;]?[ \t]*(?:then|therefore|thus)[ \t]*,?)?"
    r"(?:[*_ \t]{0,4}[:\uff1a][*_ \t]{0,4}(?:is[ \t:]+)?"
    r"|[*_ \t]{1,4}(?:is|are|will be|would be|must be|has to be|equals"
    r"|(?:comes|turns|works) out to be|comes to)\b[*_ \t]{0,4}[:\uff1a]?"
    r"|[*_ \t]{1,4}(?:=>?|->|\u2192|\u21d2))))",
    re.MULTILINE,
)
"""It starts with a set of letters, which the engine looks for at its fastest."""

LAST_LINE_MARK = re.compile(r"[ \t*_>]{0,8}A[*_]{0,3}:[*_ \t]{0,4}")
HEADING = re.compile(
    r"^[ \t]{0,3}(?:(?:#{1,6}[ \t]*[*_]{0,3}|[*_]{1,3})(?:final[ \t]+)?answer[*_]{0,3}[ \t]*$"
    r"|[*_]{0,3}(?:final[ \t]+)?answer[*_]{0,3}[ \t]+(?!\d+[ \t]*[:.)][ \t]*\S)"
    r"(?=[-+(\[\\$*]{0,4}\d[^\nA-Za-z]{0,60}$|\\[(\[]|\$[^$\n]{1,200}\$[.* \t]*$|[*(]{0,3}[A-H][).*]{0,4}[ \t]*$))",
    re.IGNORECASE | re.MULTILINE,
)
"""A heading of its own line, or a line that starts with `Answer` and goes on with a value."""

TAG, END_TAG = "<answer>", "</answer>"
END_TOKENS = re.compile(
    r"(?:\s*(?:</s>|<eos>|<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|<(?:end|start)_of_turn>|\[EOS\]))+\s*\Z"
)
TOKENS_LONGEST = 200  # characters of special tokens at the end of a response
TABLE_ROW = re.compile(r"\|[^\n]*\|[ \t]*\Z")
CLOSING_HASHES = re.compile(r"[ \t]+#{2,6}[ \t]*$")
FENCE = re.compile(r"(?:[ \t]*(?:```|~~~)[A-Za-z]{0,12}[ \t]*(?:\n|$)|[ \t]*\n){1,6}")
BULLETS = re.compile(r"(?:[ \t]*[-*][ \t]+\S[^\n]*(?:\n|$))+")
REMARK = re.compile(
    r"(?:indeed |also |therefore |thus |clearly |very )?(?:right|correct|clear|reasonable|plausible|consistent"
    r"|verified|confirmed|valid|sensible|justified|obvious|unique)\b[^\d$\\]{0,80}",
    re.IGNORECASE,
)
"""What says something about an answer that was given before."""

PLACEHOLDER = re.compile(
    r"[\s*_`\"'$]*(?:<[^<>\n]{0,80}>|\[(?:your|the|final|insert|answer|result)[^\]\n]{0,80}\]|\.\.\.+|…|_{2,}"
    r"|\\?\{?(?:your|the|final|insert)[ _-](?:final[ _-])?(?:answer|result|solution|choice|number)(?:[ _-]here)?\}?"
    r"|\\(?:text|boxed)\{\s*\}|answer|\$?answer\$?|\\ldots|\\dots|\?+)[\s.*_`\"'$)]*",
    re.IGNORECASE,
)
ABBREVIATIONS_WORDS = "st mr mrs ms dr prof vs approx no nos fig eq sq cu ft in rs e.g i.e etc jr sr u.s a.m p.m mt"
ABBREVIATIONS = frozenset(ABBREVIATIONS_WORDS.split())
SENTENCE_END = re.compile(r"[.!?](?=[*_\"'”)\]]{0,3}(?:\s|$))|。")
OPENINGS = {"\\[": "\\]", "$$": "$$", "\\(": "\\)"}
NUMBER = re.compile(
    rf"(?:(?:US)?[$€£¥₹]\s?)?(?<![\w.])[-\u2212]?(?:\d+/\d+|\d+,\d{{2}}(?![\d,])|{PLAIN.pattern}(?:[eE][-+]?\d+)?)"
    r"(?:\s?(?:\\?%|percent\b))?"
)


@dataclass(frozen=True)
class Extraction:
    """An answer's text and where it was found. `fault`: why it is wrong whatever it says; `others`: earlier boxes."""

    source: str
    text: str
    fault: str = ""
    others: tuple[str, ...] = ()
    rest: str = ""
    """What follows on the answer's line behind its sentence."""

    later: str = ""
    """The answer line behind the last box, '' if there is none."""


def extract(response: str, last_number: bool) -> Extraction | None:
    """The answer of a response, None if it has none. Takes time proportional to SEARCHED at most."""
    text = without_end_tokens(SURROGATE.sub("\ufffd", response[-SEARCHED:]))
    return _boxed(text) or _marked(text) or (_last_number(text) if last_number else None)


def without_end_tokens(text: str) -> str:
    """The text without the special tokens by which a model ends it: `</s>`, `<|im_end|>`."""
    tail = text[-TOKENS_LONGEST:]
    found = END_TOKENS.search(tail) if ">" in tail or "]" in tail else None
    return text[: len(text) - len(tail) + found.start()] if found else text


def boxes(text: str) -> list[str]:
    """The contents of all boxes of a text, in their order; none if one of them is not closed."""
    found, truncated = _contents(text)
    return [] if truncated else [box.strip() for box, _, _ in found]


def _boxed(text: str) -> Extraction | None:
    found, truncated = _contents(text)
    if truncated:
        return Extraction("box", truncated, fault="truncated: the box is not closed")
    if not found:
        return None
    last, start, end = found[-1]
    last = last.strip()
    if not last or PLACEHOLDER.fullmatch(last):
        return Extraction("box", last, fault="the last box is empty")
    others = dict.fromkeys(box.strip() for box, _, _ in found[:-1] if not PLACEHOLDER.fullmatch(box) and box.strip())
    others.pop(last, None)
    if len(others) > BOXES:
        return Extraction("box", last, fault="several different boxes")
    behind = text[end:]
    whole, fault = (last, "") if others else whole_box(text[:start][-LONGEST:], last, behind)
    if retracted := withdrawal(last, behind):
        fault = f"hedged: {retracted!r} follows the answer"
    later = _marked(behind[:LONGEST]) if len(behind) >= SHORTEST_MARK else None
    return Extraction("box", whole, fault=fault, others=tuple(others), later=later.text if later else "")


Span = tuple[str, int, int]
"""A box's content, where the box starts and where it ends."""


def _contents(text: str) -> tuple[list[Span], str]:
    """The outermost boxes, and what follows the start of one that is not closed."""
    found: list[Span] = []
    end = 0
    truncated = ""
    for box in BOX.finditer(text):
        if box.start() < end:
            continue  # inside another box
        if text[box.end() : box.end() + 1] == "{":
            end = closing_brace(text, box.end())
            if end < 0:
                truncated = text[box.end() : box.end() + LONGEST]
                break
            found.append((text[box.end() + 1 : end], box.start(), end + 1))
        else:
            token = re.compile(r"[^\s{}$\\]{1,40}").match(text, box.end())
            if token is not None:
                end = box.end() + len(token[0].rstrip(".,;"))
                found.append((text[box.end() : end], box.start(), end))
    return found, truncated


def _marked(text: str) -> Extraction | None:
    marks = [
        (found.start(), found.end())
        for found in MARK.finditer(text)
        if not is_no_mark(text[max(0, found.start() - BEFORE) : found.start()].rpartition("\n")[2])
    ]
    marks += [(found.start(), found.end()) for found in HEADING.finditer(text)]
    if (tag := text.rfind(TAG)) >= 0:
        marks.append((tag, tag + len(TAG)))
    stripped = text.rstrip()
    line = stripped.rfind("\n") + 1
    opening = LAST_LINE_MARK.match(stripped, line)
    if opening is not None:
        marks.append((line, opening.end()))
    remark = None
    for _, end in sorted(marks, reverse=True)[:50]:
        found = _answer_line(text, end)
        if found is not None and not (REMARK.fullmatch(found.text) and not found.fault):
            return found
        remark = remark or found
    return remark


def _answer_line(text: str, start: int) -> Extraction | None:
    """The answer behind a mark, None if the mark is followed by a placeholder."""
    if text.endswith(TAG, 0, start) and (end := text.find(END_TAG, start)) >= 0:
        return _sentence(" ".join(text[start : min(end, start + LONGEST)].split()), text[end + len(END_TAG) :])
    line_end = text.find("\n", start)
    line_end = len(text) if line_end < 0 else line_end
    if not text[start:line_end].strip(" \t*_:>#"):
        following = re.compile(r"\S").search(text, line_end)
        if following is None:
            return Extraction("answer line", "", fault="nothing follows the mark")
        start = text.rfind("\n", 0, following.start()) + 1
        fence = FENCE.match(text, start)
        start = fence.end() if fence else start
        listed = BULLETS.match(text, start)
        if listed is not None:
            return _bulleted(listed[0], text[listed.end() :])
        line_end = text.find("\n", start)
        line_end = len(text) if line_end < 0 else line_end
        while start < line_end and text[start] in " \t>#":  # of a quotation or a heading
            start += 1
    closed = text.find(END_TAG, start, line_end)
    line_end = _whole_formula(text, start, line_end) if closed < 0 else closed
    line = text[start:line_end].lstrip(" \t*_:")
    whole = text[text.rfind("\n", 0, start) + 1 : line_end].lstrip()
    line = line.rstrip(" `") if whole.startswith("`") else line
    if TABLE_ROW.match(whole) and (line.count("|") % 2 or not line.startswith("|")):
        line = line.rstrip()[:-1].rstrip()
    if lacks_operand(whole, line):
        return Extraction("answer line", line, fault="truncated: an operand is missing")
    line = CLOSING_HASHES.sub("", line).rstrip(" \t*_:")
    return _sentence(line, text[line_end:])


def _bulleted(block: str, behind: str) -> Extraction | None:
    """The answer in a list below a mark: all of its points."""
    points = [re.sub(r"^[ \t]*[-*][ \t]+", "", line).strip(" \t*_") for line in block.strip().splitlines()]
    if len(points) > 1:
        return Extraction("answer line", ", ".join(points)[: LONGEST + 1])
    return _sentence(points[0], behind)


def _sentence(line: str, behind: str) -> Extraction | None:
    """The answer in the first sentence of a line, None if that is a placeholder. `behind`: the following lines."""
    line = line[: LONGEST + 1]
    if PLACEHOLDER.fullmatch(line):
        return None
    sentence, rest = _first_sentence(line)
    if PLACEHOLDER.fullmatch(sentence):
        return None
    retracted = retraction(rest) or withdrawal(sentence, f"{rest}\n{behind}")
    fault = f"hedged: {retracted!r} follows the answer" if retracted else ""
    return Extraction("answer line", sentence, fault=fault, rest=rest)


def _whole_formula(text: str, start: int, line_end: int) -> int:
    """The end of the line on which a formula or matrix ends that the answer's line opens."""
    line = text[start:line_end]
    for opening, closing in OPENINGS.items():
        if opening in line:
            behind = start + line.rindex(opening) + len(opening)
            if opening == "$$" and line.count("$$") % 2 == 0:
                continue
            end = text.find(closing, behind, start + LONGEST)
            if end >= line_end:
                return end + len(closing)
    if line.count("\\begin") > line.count("\\end"):
        end = text.find("\\end", line_end, start + LONGEST)
        if end >= 0:
            behind = text.find("\n", end)
            return len(text) if behind < 0 else behind
    return line_end


def _first_sentence(line: str) -> tuple[str, str]:
    """The line's first sentence without its full stop, and the rest; a formula in dollar signs is not cut."""
    for end in SENTENCE_END.finditer(line):
        at = end.start()
        before, after = line[:at], line[end.end() :]
        if before.endswith("\\"):
            continue
        if end[0] == "." and (before.endswith(".") or after.startswith(".")):
            continue
        word = re.search(r"[A-Za-z][A-Za-z.]*$", before[-12:])
        if end[0] == "." and word is not None and word[0].lower() in ABBREVIATIONS and after.strip():
            continue
        if end[0] == "." and re.search(r"(?:^|\s)\d{1,2}$", before) and re.match(r"\s+\d", after):
            continue
        if _open_formula(before) or not before.strip(" \t*_"):
            continue
        keeps = end.end() if end[0] in "!?" else at
        return line[:keeps].strip(), after.strip(" *_\"'")
    return line.strip(), ""


def _open_formula(before: str) -> bool:
    if before.count("\\(") > before.count("\\)") or before.count("\\[") > before.count("\\]"):
        return True
    if before.count("{") - before.count("\\{") > before.count("}") - before.count("\\}"):
        return True
    dollars = before.replace("\\$", "")
    return bool(re.search(r"\$(?!\d)", dollars)) and dollars.count("$") % 2 == 1


def _last_number(text: str) -> Extraction | None:
    last = None
    for found in NUMBER.finditer(text):
        last = found
    return Extraction("last number", last[0].rstrip(".")) if last else None
