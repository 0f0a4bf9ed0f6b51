"""Map the five top-level folders to sub-packages of `longprefill`; all metadata is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

ROOTS = ("partition", "kernels", "comms", "workers", "orchestrator")
PACKAGES = [name for root in ROOTS for name in (root, *(f"{root}.{sub}" for sub in find_namespace_packages(root)))]

setup(
    packages=[f"longprefill.{name}" for name in PACKAGES],
    package_dir={f"longprefill.{name}": name.replace(".", "/") for name in PACKAGES},
    package_data={"": ["*.cpp", "*.h", "*.html", "*.toml", "py.typed"]},
)
