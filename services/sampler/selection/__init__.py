"""Owns which prompt is drawn next, how much of its group is generated, and which kept group is trained first.

Must not do I/O, nor judge a whole group; that rule is credit's.
"""
