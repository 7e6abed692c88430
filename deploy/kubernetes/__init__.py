"""Owns the pods of a Kubernetes cluster: what runs as the first process of each, beside the API's.

Must not import ray; deploy.hosting does.
"""
