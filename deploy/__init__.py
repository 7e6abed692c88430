"""Owns what turns services into a platform: the command `penstock`, placement on a laptop or a cluster, images.

Must not hold an algorithm, nor be imported by a service.
"""
