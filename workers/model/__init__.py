"""Model configs (torch-free), weights and layers."""
