"""Owns the first process of each Ray pod in Kubernetes, the chart's uninstall hook and its README.

Must not import ray; deploy.hosting does.
"""
