"""Owns the tests of the plot of a run's curves.

Must not look at its pixels.
"""

from __future__ import annotations

from pathlib import Path

from deploy.cli.curves import PANELS, draw_curves, panels_of
from tests.penstock_client.cli.viewing import evaluated, step


def test_curves_are_a_png(tmp_path: Path) -> None:
    evaluations = [evaluated("before"), evaluated("after", version=2), evaluated("after", set="aime", version=2)]
    path = draw_curves("r", [step(1, 0.0, accuracy=0.2), step(2, 1.0, accuracy=0.3)], evaluations, tmp_path / "c.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_have_a_panel_of_scores_where_they_say_more(tmp_path: Path) -> None:
    assert panels_of([step(1, 0.0, accuracy=0.2, score=0.2)]) == PANELS
    assert panels_of([step(1, 0.0, accuracy=0.2)]) == PANELS, "a step of an older release"
    [*_, (title, lines)] = panels_of([step(1, 0.0, accuracy=0.2, score=0.3)])
    assert (title, lines) == ("scores", (("score", "score"),))
    steps = [step(1, 0.0, accuracy=0.2, score=0.2, reward_has_a_box=0.5), step(2, 1.0, reward_style=0.5)]
    [*_, (_, lines)] = panels_of(steps)
    assert lines == (("score", "score"), ("reward_has_a_box", "has-a-box"), ("reward_style", "style"))
    assert draw_curves("r", steps, [], tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
