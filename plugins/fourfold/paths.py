"""Where the configuration trees lie: beside plugins/ in a checkout, inside the package in a wheel."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE if (_HERE / "conf").is_dir() else _HERE.parents[1]

CONF = _ROOT / "conf"
RECIPES = _ROOT / "recipes"
