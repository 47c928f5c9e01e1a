"""What pyproject.toml cannot say: ``models/`` is installed as ``varcomm.models``.

There, a mapping and the automatic discovery of packages cannot be combined.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["varcomm", "varcomm.*"]),
        "varcomm.models",
        *(f"varcomm.models.{name}" for name in find_packages("models")),
    ],
    package_dir={"varcomm.models": "models"},
    package_data={"varcomm": ["py.typed"]},
)
