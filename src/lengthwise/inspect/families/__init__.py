"""How to look into each family of models: a route each.

A route says which encoding a model has and how many layers, and watches them for the length of one forward pass.
"""
