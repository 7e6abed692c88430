"""Owns what the images are made with: scripts that install packages, bills of materials, the owners of installed files.

Must not be needed by a service at run time.
"""
