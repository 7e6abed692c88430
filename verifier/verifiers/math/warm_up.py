"""Owns the formulas that a warm parent judges before it forks: the libraries' caches then belong to all its processes.

Must not see a text of a run. A first formula of a kind takes some hundred times as long as the next one.
"""

from __future__ import annotations

from verifier.verifiers.math.verdict import judge

FORMULAS = (
    (r"\frac{3}{7}", r"\frac{5}{7}"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt{2}}{2}"),
    (r"\sqrt[3]{12}", r"\sqrt{15}"),
    (r"2\sqrt{3} + \sqrt{5}", r"\sqrt{5} - 2\sqrt{3}"),
    (r"24\pi", r"26\pi"),
    (r"\frac{\pi}{6}", r"\frac{\pi}{3}"),
    (r"2^{12}", r"2^{13}"),
    (r"e^{2x}", r"e^{3x}"),
    (r"\log_2 12", r"\ln 12"),
    (r"\sin 2x", r"2 \sin x \cos x"),
    (r"\tan \frac{\pi}{8}", r"\sqrt{2} - 1"),
    (r"22x^2 + 25x", r"25x^2 + 22x"),
    (r"(x + 1)(x - 2)", r"x^2 - x - 2"),
    (r"\frac{x + 1}{x - 2}", r"\frac{x - 1}{x - 2}"),
    (r"a^3b - 2ab^2 + 7", r"a^3b + 2ab^2 + 7"),
    (r"3 + 4i", r"3 - 4i"),
    (r"\binom{7}{2}", "7!"),
    (r"|x - 3|", r"|x + 3|"),
    (r"y = 2x + 3", r"y = 3x + 2"),
    (r"(3, 4)", r"(4, 3)"),
    (r"[2, 5)", r"(2, 5)"),
    (r"(-\infty, 2] \cup (3, \infty)", r"(-\infty, 2) \cup (3, \infty)"),
    (r"\{1, 2, 3\}", r"\{1, 2\}"),
    (r"x \ge 3", r"x > 3"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}"),
)
"""A reference and an answer of each kind that data sets of mathematics have."""


def warm_up() -> None:
    """Judge all pairs, in about a second."""
    for reference, answer in FORMULAS:
        judge(f"The answer is $\\boxed{{{answer}}}$.", {"answer": reference})
