"""`fourfold verify`: a recipe, made small, against one process that has none of this package's parallel code."""
