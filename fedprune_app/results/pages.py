"""A page is a template that is filled; every value is escaped, and one that the template names has to be there."""

from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined


def filled(package: str, template: str, **values: Any) -> str:
    """Return the page of a ``template``, a file in ``package``. JSON goes through tojson in the template.

    tojson keeps '<' out of script elements, and escaping covers all else.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = resources.files(package).joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(**values)
