"""Layer-by-layer alignment of a mesh's run with transformers or with one rank (`longprefill align`)."""
