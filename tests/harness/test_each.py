"""One test over many cases: each is checked, every failure is told with its name, and none is swallowed."""

import pytest

from tests.harness.each import each


def test_every_failure_is_told_by_name_with_its_values():
    looked_at = []

    @each("number", [1, 2, 3, 4], called=lambda number: f"number {number}")
    def even(number):
        looked_at.append(number)
        assert number % 2 == 0, "is odd"

    with pytest.raises(pytest.fail.Exception) as raised:
        even()
    told = str(raised.value)
    assert told.startswith("2 of 4 fail: number 1; number 3\n")
    assert told.count("AssertionError: is odd\nassert (1 % 2) == 0") == 1
    assert told.count("assert (3 % 2) == 0") == 1
    assert "test_each.py" in told
    assert looked_at == [1, 2, 3, 4]


def test_cases_of_one_name_are_all_told():
    @each("number", [1, 2], called=lambda _: "same")
    def none(number):
        raise ValueError(f"the {number}")

    with pytest.raises(pytest.fail.Exception, match=r"(?s)2 of 2 fail: same; same.*the 1.*the 2"):
        none()


def test_an_error_and_what_was_not_raised_are_failures_too():
    @each("what", ["key", "raises", "fine"])
    def mixed(what):
        if what == "key":
            raise KeyError("gone")
        if what == "raises":
            with pytest.raises(ValueError, match="x"):
                pass

    with pytest.raises(pytest.fail.Exception, match=r"(?s)2 of 3 fail: key; raises.*KeyError: 'gone'.*DID NOT RAISE"):
        mixed()


def test_a_case_that_skips_fails_and_hides_no_other():
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
def test_fixtures_stand_beside_the_cases(number, word, tmp_path):
    assert {1: "one", 2: "two"}[number] == word
    assert tmp_path.is_dir()


def test_what_could_not_fail_is_refused():
    for nothing in ([], lambda: iter(())):
        with pytest.raises(AssertionError, match="there are no cases"):
            each("number", nothing)(lambda number: None)()

    async def later(number):
        raise AssertionError

    with pytest.raises(TypeError, match="nothing would await"):
        each("number", [1])(later)
    with pytest.raises(pytest.fail.Exception, match=r"argument 2 is longer"):
        each("a, b", [(1, 2, 3)])(lambda a, b: None)()
