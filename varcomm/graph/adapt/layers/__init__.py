"""Tables and checks of PyG's layers, and replacements of their functions."""
