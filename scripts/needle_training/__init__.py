"""Training of the needle model: data, model, optimiser, curriculum, loop. `scripts/train_needle` is the way in."""
