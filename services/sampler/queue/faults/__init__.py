"""Owns what the queue does about messages and groups that are lost: dead letters, and differences from Redis.

Must not judge a response, or decide what a group is worth.
"""
