"""Owns the list of dashboards.

Must not draw one; each has a file of its own.
"""

from deploy.observability.dashboards.data import DATA
from deploy.observability.dashboards.fleet import FLEET
from deploy.observability.dashboards.learner import LEARNER
from deploy.observability.dashboards.run import RUN
from deploy.observability.dashboards.verifier import VERIFIER
from deploy.observability.panels import Board

BOARDS: tuple[Board, ...] = (RUN, FLEET, LEARNER, DATA, VERIFIER)
"""Every dashboard; its file is named after its uid."""
