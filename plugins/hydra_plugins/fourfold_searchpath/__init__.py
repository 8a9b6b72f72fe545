"""Lets Hydra find recipes/ beside conf/, in a checkout and in a wheel, and only in fourfold's own runs."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from fourfold.paths import CONF, RECIPES


class FourfoldSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        ours = {str(CONF), f"file://{CONF}"}
        if any(entry.provider == "main" and entry.path in ours for entry in search_path.get_path()):
            search_path.append(provider="fourfold-recipes", path=f"file://{RECIPES}")
