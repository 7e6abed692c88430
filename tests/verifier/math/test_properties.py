"""Every notation of a value equals the value, and differs from every other value."""

from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verifier.verifiers.math.verdict import judge

INTEGERS = st.integers(-10_000_000, 10_000_000)
RATIONALS = st.fractions(-1000, 1000, max_denominator=500)


def of_integer(value: int) -> list[str]:
    return [
        str(value),
        f"{value:,}",
        f"{value:,}".replace(",", "{,}"),
        f"{value:,}".replace(",", r",\!"),
        f"{value:,}".replace(",", r"\,"),
        f"{value:,}".replace(",", " "),
        f"{value}.00",
        f"{value:,}.0",
        f"{value}".replace("-", "\u2212"),
        rf"\frac{{{3 * value}}}{{3}}",
        f"{2 * value}/2",
        rf"\text{{{value}}}",
        f"${value}$",
        f"x = {value}",
        f"**{value}**",
    ]


def of_fraction(value: Fraction) -> list[str]:
    above, below = value.numerator, value.denominator
    whole, rest = divmod(abs(above), below)
    sign = "-" if above < 0 else ""
    mixed = [rf"{sign}{whole}\frac{{{rest}}}{{{below}}}", f"{sign}{whole} {rest}/{below}"] if whole and rest else []
    return [
        f"{above}/{below}",
        rf"\frac{{{above}}}{{{below}}}",
        rf"{sign}\dfrac{{{abs(above)}}}{{{below}}}",
        rf"\tfrac{{{7 * above}}}{{{7 * below}}}",
        f"{above} / {below}",
        *mixed,
    ]


def correct(answer: str, reference: str) -> bool:
    return all(judge(form % answer, {"answer": reference}, {}).correct for form in ("Answer: %s", r"\boxed{%s}"))


def wrong(answer: str, reference: str) -> bool:
    return not any(judge(form % answer, {"answer": reference}, {}).correct for form in ("Answer: %s", r"\boxed{%s}"))


@settings(max_examples=150, deadline=None)
@given(INTEGERS, st.integers(1, 1000))
def test_integers(value, other):
    written = of_integer(value)
    assert [text for text in written if not correct(text, str(value))] == []
    assert [text for text in written if not wrong(text, str(value + other))] == []
    if value:
        assert [text for text in written if not wrong(text, str(-value))] == []


@settings(max_examples=150, deadline=None)
@given(RATIONALS, RATIONALS)
def test_fractions(value, other):
    assume(value.denominator > 1)
    assume(value != other)
    written = of_fraction(value)
    assert [text for text in written if not correct(text, written[0])] == []
    assert [text for text in written for reference in of_fraction(other) if not wrong(text, reference)] == []


@settings(max_examples=150, deadline=None)
@given(st.integers(-10_000_000, 10_000_000), st.integers(1, 4))
def test_decimals(digits, places):
    value = Fraction(digits, 10**places)
    text = f"{digits / 10**places:.{places}f}"
    written = [text, f"{text}0", text.replace(".", ","), rf"{digits} \times 10^{{-{places}}}", f"{digits}e-{places}"]
    if places == 3:  # a comma before three digits separates thousands
        written.remove(text.replace(".", ","))
    reference = f"{value.numerator}/{value.denominator}"
    assert [text for text in written if not correct(text, reference)] == []
    assert [text for text in written if not wrong(text, f"{value + 1}")] == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
def test_lists_and_sets_have_no_order_and_tuples_do(values, random):
    shuffled = random.sample(values, len(values))
    joined, other = ", ".join(map(str, values)), ", ".join(map(str, shuffled))
    assert correct(other, joined)
    assert correct(rf"\{{{other}\}}", rf"\{{{joined}\}}")
    assert correct(f"({joined})", f"({joined})")
    assert wrong(f"({joined})", f"[{joined}]")
    assert wrong(", ".join(map(str, values[:-1])), joined)
    if shuffled != values:
        assert wrong(f"({other})", f"({joined})")


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 9999),
    st.sampled_from([("m", "cm", 100), ("km", "m", 1000), ("hours", "minutes", 60), ("kg", "g", 1000)]),
)
def test_units_convert(value, units):
    large, small, factor = units
    assert correct(f"{value * factor} {small}", f"{value} {large}")
    assert correct(rf"{value} \text{{ {large}}}", f"{value * factor} {small}")
    assert wrong(f"{value} {small}", f"{value} {large}")
    assert wrong(f"{value} liters", f"{value} {large}")


@settings(max_examples=100, deadline=None)
@given(INTEGERS, INTEGERS)
def test_a_hedge_between_different_numbers_is_wrong(one, other):
    assume(one != other)
    for text in (
        f"{one} or {other}",
        f"either {one} or {other}",
        f"{one} (or maybe {other})",
        f"between {one} and {other}",
    ):
        assert wrong(text, str(one))
        assert wrong(text, str(other))
