"""One test over many cases: each is checked, and every failure is reported by name."""

import pytest

from tests.harness.each import each


def test_every_failure_is_reported_by_name_with_its_values():
    looked_at = []

    @each("number", [1, 2, 3, 4], called=lambda number: f"number {number}")
    def even(number):
        looked_at.append(number)
        assert number % 2 == 0, "is odd"

    with pytest.raises(pytest.fail.Exception) as raised:
        even()
    report = str(raised.value)
    assert report.startswith("2 of 4 fail: number 1; number 3\n")
    assert report.count("AssertionError: is odd\nassert (1 % 2) == 0") == 1
    assert report.count("assert (3 % 2) == 0") == 1
    assert "test_each.py" in report
    assert looked_at == [1, 2, 3, 4]


def test_cases_with_the_same_name_are_all_reported():
    @each("number", [1, 2], called=lambda _: "same")
    def none(number):
        raise ValueError(f"the {number}")

    with pytest.raises(pytest.fail.Exception, match=r"(?s)2 of 2 fail: same; same.*the 1.*the 2"):
        none()


def test_errors_and_missing_exceptions_are_failures_too():
    @each("what", ["key", "raises", "fine"])
    def mixed(what):
        if what == "key":
            raise KeyError("gone")
        if what == "raises":
            with pytest.raises(ValueError, match="x"):
                pass

    with pytest.raises(pytest.fail.Exception, match=r"(?s)2 of 3 fail: key; raises.*KeyError: 'gone'.*DID NOT RAISE"):
        mixed()


def test_a_skipping_case_fails_and_hides_no_other_case():
    @each("number", [1, 2, 3])
    def skipping(number):
        if number == 2:
            pytest.skip("no such program")
        assert number == 3

    with pytest.raises(pytest.fail.Exception, match=r"(?s)2 of 3 fail: 1; 2.*no such program"):
        skipping()


def test_a_timeout_ends_the_test():
    looked_at = []

    @each("number", [1, 2])
    def hanging(number):
        looked_at.append(number)
        pytest.fail("Timeout (>300.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception, match=r"^Timeout"):
        hanging()
    assert looked_at == [1]


@each("number, word", lambda: [(1, "one"), (2, "two")])
def test_cases_can_be_combined_with_fixtures(number, word, tmp_path):
    assert {1: "one", 2: "two"}[number] == word
    assert tmp_path.is_dir()


def test_a_test_that_could_not_fail_is_rejected():
    for nothing in ([], lambda: iter(())):
        with pytest.raises(AssertionError, match="there are no cases"):
            each("number", nothing)(lambda number: None)()

    async def later(number):
        raise AssertionError

    with pytest.raises(TypeError, match="would not be awaited"):
        each("number", [1])(later)
    with pytest.raises(pytest.fail.Exception, match=r"argument 2 is longer"):
        each("a, b", [(1, 2, 3)])(lambda a, b: None)()
