"""Model families: how a published config and its tensor names map onto `ModelConfig` and the canonical parameters.

A family is one module and one row in `registry.py`. Nothing here imports torch.
"""
