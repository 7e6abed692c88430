"""Owns the first process of each Ray pod in Kubernetes, the chart's uninstall hook, its README and its package.

Must not import ray; deploy.hosting does.
"""
