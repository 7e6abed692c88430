"""A quantile never exceeds the last finite bucket: it must lie above everything with which the quantile is compared."""

from operator import attrgetter

import promql_parser

from services.metrics import SYNC_SECONDS, families
from services.metrics.tables import SETTINGS
from services.settings import load_recipe
from tests.observability.reading import ROOT, alerts, dashboards, metrics_of, panels, rules, substituted, walk

RECIPES = sorted((ROOT / "deploy" / "recipes").glob("*.yaml"))
ARITHMETIC = {"*": lambda a, b: a * b, "+": lambda a, b: a + b, "-": lambda a, b: a - b, "/": lambda a, b: a / b}
PATHS = {family._name: path for path, family in SETTINGS.items()}


def value_of(expression, recipe):
    """What the expression is for a recipe: a number, or made of its settings; None if it reads anything else."""
    if isinstance(expression, promql_parser.NumberLiteral):
        return expression.val
    if isinstance(expression, promql_parser.ParenExpr | promql_parser.AggregateExpr):
        return value_of(expression.expr, recipe)
    if isinstance(expression, promql_parser.VectorSelector) and expression.name in PATHS:
        return attrgetter(PATHS[expression.name])(recipe)
    if isinstance(expression, promql_parser.BinaryExpr) and str(expression.op) in ARITHMETIC:
        sides = (value_of(expression.lhs, recipe), value_of(expression.rhs, recipe))
        return None if None in sides else ARITHMETIC[str(expression.op)](*sides)
    return None


def histograms_in(expression):
    """The histograms of whose quantiles the expression consists."""
    for part in walk(expression):
        if isinstance(part, promql_parser.Call) and part.func.name == "histogram_quantile":
            yield from (name.removesuffix("_bucket") for name in metrics_of(str(part.args[1])))


def comparisons(expression, recipe):
    """Every comparison of a quantile with a value: (histogram, value)."""
    for part in walk(promql_parser.parse(expression)):
        if isinstance(part, promql_parser.BinaryExpr) and str(part.op) in (">", ">=", "<", "<="):
            for one, other in ((part.lhs, part.rhs), (part.rhs, part.lhs)):
                if (value := value_of(other, recipe)) is not None:
                    yield from ((histogram, value) for histogram in histograms_in(one))


def shown_together(panel, recipe):
    """The same for a panel that shows quantiles beside settings and coloured thresholds."""
    parsed = [promql_parser.parse(substituted(target["expr"])) for target in panel["targets"]]
    histograms = {name for expression in parsed for name in histograms_in(expression)}
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    values = [value_of(expression, recipe) for expression in parsed] + [step.get("value") for step in steps]
    for histogram in histograms:
        yield from ((histogram, value) for value in values if value is not None)


def last_bucket(histogram):
    """Its largest finite bound; None for a histogram of another program."""
    found = [family for family in families() if family._name == histogram]
    return found[0]._upper_bounds[-2] if found else None


def test_the_last_bucket_lies_above_every_threshold():
    compared = set()
    for path in RECIPES:
        recipe = load_recipe(path)
        found = {(rule.get("alert"), *pair) for rule in rules() for pair in comparisons(rule["expr"], recipe)}
        for board in dashboards().values():
            found |= {(panel["title"], *pair) for panel in panels(board) for pair in shown_together(panel, recipe)}
        for where, histogram, value in found:
            largest = last_bucket(histogram)
            assert largest is None or largest > value, f"{where}, {path.name}: {histogram} ends at {largest} s"
            compared.add((where, histogram))
    assert {
        ("ApiSlow", "penstock_api_request_seconds"),
        ("Sync duration, 90th percentile", "penstock_weight_sync_seconds"),
    } <= compared


def test_a_threshold_is_derived_from_a_rule_and_a_recipe():
    """The rule that could never fire: 0.5 * 300 s for the larger recipe, and buckets that ended at 60 s."""
    quantile = "histogram_quantile(0.9, sum by (run, le) (rate(penstock_weight_sync_seconds_bucket[10m])))"
    rule = f"{quantile} > on (run) 0.5 * max by (run) (penstock_setting_weights_timeout_seconds)"
    thresholds = [value for path in RECIPES for _, value in comparisons(rule, load_recipe(path))]
    assert max(thresholds) == 150.0
    assert len(thresholds) == len(RECIPES)


def test_every_shipped_deadline_of_a_sync_is_within_the_buckets():
    assert "weights_timeout_seconds" in alerts()["WeightSyncSlow"]["expr"]
    deadlines = [load_recipe(path).weights.timeout_s for path in RECIPES]
    assert SYNC_SECONDS._upper_bounds[-2] >= 2 * max(deadlines)
    assert sum(bound <= 0.5 * min(deadlines) for bound in SYNC_SECONDS._upper_bounds) >= 5, "and not too coarse"
