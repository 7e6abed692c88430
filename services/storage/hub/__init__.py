"""Owns models and data sets of the Hugging Face Hub: their addresses, and their copies on a node and in the store.

Must not know what a file means. Only the program `services.storage.hub.download` connects to the hub.
"""
