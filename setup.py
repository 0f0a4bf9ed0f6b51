"""Map the five top-level folders to sub-packages of `longprefill`; all metadata is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

ROOTS = ("partition", "kernels", "comms", "workers", "orchestrator")
FOUND = {root: find_namespace_packages(root, exclude=["*__pycache__*"]) for root in ROOTS}
PACKAGES = [name for root, found in FOUND.items() for name in (root, *(f"{root}.{sub}" for sub in found))]

setup(
    packages=[f"longprefill.{name}" for name in PACKAGES],
    package_dir={f"longprefill.{name}": name.replace(".", "/") for name in PACKAGES},
    package_data={"": ["*.cpp", "*.h", "*.html", "*.css", "*.js", "*.svg", "*.toml", "*.json"]},
)
