"""Owns the choice of the next prompt, the screening of groups, and the order in which kept groups are trained.

Must not do I/O, or decide on a fully judged group; `advantage.filtering` does.
"""
