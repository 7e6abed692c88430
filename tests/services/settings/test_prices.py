"""The prices of a platform, as the operator states them."""

import pytest

from deploy.local.preflight import StackError, check_prices
from services.settings import PricesError, load_prices
from services.settings.operator.prices import NANO, VARIABLE
from tests.harness.each import each


@pytest.mark.parametrize("text", [None, ""])
def test_a_platform_may_have_no_prices(monkeypatch, text):
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert load_prices() is None


def test_prices_are_per_hour(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"currency": "USD", "gpu_hour": 2.5, "cpu_hour": 0.04}')
    prices = load_prices()
    assert prices.cost(3_600_000, 0) == 2.5 * NANO
    assert prices.cost(0, 2 * 3_600_000) == 0.08 * NANO
    assert prices.cost(0, 1) == 11, "a millisecond of a CPU is not lost"


@each(
    "text, told",
    [
        ("{", "PENSTOCK_PRICES: '{' is not valid: expected a JSON object such as"),
        ("[]", "PENSTOCK_PRICES: '[]' is not valid: expected a JSON object such as"),
        ("{}", "PENSTOCK_PRICES: currency: missing: this field is required"),
        ('{"currency": "dollar"}', "PENSTOCK_PRICES: currency: 'dollar' is not valid: expected"),
        (
            '{"currency": "USD", "gpu_hour": -1}',
            "PENSTOCK_PRICES: gpu_hour: -1 is not valid: expected a number greater",
        ),
        ('{"currency": "USD", "gpu_hour": NaN}', "PENSTOCK_PRICES"),
        ('{"currency": "USD", "gpus": 1}', "PENSTOCK_PRICES: gpus: 1 is not valid: expected a known field"),
    ],
)
def test_wrong_prices_are_explained(text, told, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(PricesError) as error:
        load_prices()
    assert str(error.value).startswith(told)
    with pytest.raises(StackError, match=r"^PENSTOCK_PRICES"):
        check_prices()
