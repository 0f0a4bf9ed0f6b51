"""Documents with planted facts, questions about them, and a picture of what a model finds. Documents are torch-free."""
